"""The command line: `multigrad demo` and `multigrad doctor`. It imports neither Keras nor a framework."""

import argparse
from collections.abc import Sequence

import multigrad
from multigrad.cli.doctor import doctor
from multigrad.frameworks import DIFFERENTIATING


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    ```python
    from multigrad.cli.main import main

    status = main(["doctor"])
    ```

    Arguments:
        arguments: the words after `multigrad`; those of the process itself by default.

    Returns:
        The exit status: 0 where all is well, 1 where the command found something wrong.

    Raises:
        SystemExit: with status 2 for arguments that cannot be understood.
    """
    given = _parser().parse_args(arguments)
    if given.command == "demo":
        from multigrad.cli.demo.command import (
            demo,  # which needs rich, that comes with Keras; the doctor may find none
        )

        return demo(given.backend)
    return doctor()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="multigrad",
        description="Custom gradients for Keras 3: one definition, the same on TensorFlow, JAX and PyTorch.",
    )
    parser.add_argument("--version", action="version", version=f"multigrad {multigrad.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    shown = commands.add_parser(
        "demo",
        help="run the same custom gradients on each installed backend, side by side",
        description="Runs three experiments on each installed backend, each in a process of its own: "
        "log1pexp at 100, a chain of squares, and a digit classifier with 3-bit activations. "
        "Exits with 1 where a backend gives a wrong answer.",
    )
    shown.add_argument(
        "--backend",
        metavar="NAME",
        choices=DIFFERENTIATING,
        help=f"run this one only: {', '.join(DIFFERENTIATING)}",
    )
    commands.add_parser(
        "doctor",
        help="print versions, the installed backends and the active one",
        description="Prints the versions of Python, multigrad, Keras and each framework, and the active "
        "backend, without importing any. Exits with 1 where the active backend cannot be imported.",
    )
    return parser
