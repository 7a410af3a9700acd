"""State that several threads share."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

FORWARD_MODE: list[None] = []
"""Has an item for each rule that is being transposed. PyTorch may run the rule in another thread."""


class Shared:
    """A context manager that is entered by the first thread to enter it and exited by the last to leave it.

    Traces use it for settings that a framework has once per process, such as
    `tf.config.run_functions_eagerly`.

    ```python
    import contextlib
    from multigrad.common.process_wide import Shared

    @contextlib.contextmanager
    def switch_on():
        print("on")
        yield
        print("off")

    switch = Shared(switch_on)
    with switch, switch:  # in one thread or in two
        pass
    # on
    # off
    ```

    Arguments:
        make: returns a new context manager that changes a process-wide setting.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make, self._lock, self._count = make, threading.Lock(), 0

    @property
    def is_active(self) -> bool:
        """Whether a thread has entered it."""
        return self._count > 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._count:
                self._context = self._make()
                self._context.__enter__()
            self._count += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._context.__exit__(None, None, None)
