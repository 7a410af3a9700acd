"""Random programs have the same values and gradients on each backend.

    pytest tests/across_backends.py

The programs are drawn here. Each installed backend runs them in a process, whose main program is this file,
too: `python -m across_backends PROGRAMS ANSWERS`. A session of nox installs all three, so pytest collects
this file only if it is named.
"""

import os
import pickle
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from programs import PRECISIONS, Program, draw

from multigrad.common.frameworks import DIFFERENTIATING, is_installed
from multigrad.common.processes import run_on
from multigrad.testing.comparison import Measurement, compare

INSTALLED = [name for name in DIFFERENTIATING if is_installed(name)]
COUNT = int(os.environ.get("MULTIGRAD_EXAMPLES", "20"))
WHAT = ["values", "gradients", "second gradients"]


def measured(backend: str, source: Path, answers: Path) -> list[list[tuple[list[str], np.ndarray]]]:
    """Return, for the values and the gradients of each program, the dtypes and shapes, and all numbers."""
    done = run_on(backend, "across_backends", str(source), str(answers))
    assert done.returncode == 0, f"{backend}: {done.stderr}"
    return pickle.loads(answers.read_bytes())


def require_alike(programs: list[Program], measured: dict[str, list]) -> None:
    """Assert that shapes are equal, and numbers as far as the lowest precision allows.

    The dtypes of gradients are equal, too. The dtypes of values, by Keras (3.15), differ for scalars.
    """
    names = {
        f"{WHAT[order]} of program {i}": program.precision
        for i, program in enumerate(programs)
        for order in range(program.orders + 1)
    }
    # A gradient may be computed in float32, whatever the dtype of the inputs.
    precisions = {name: max(dtype, "float32", key=PRECISIONS.index) for name, dtype in names.items()}
    arrays = {}
    for backend, answers in measured.items():
        flat = [answer for program in answers for answer in program]
        arrays[backend] = dict(zip(names, flat, strict=True))
    first, *others = arrays
    for name, (described, _) in arrays[first].items():
        for other in others:
            theirs, ours = arrays[other][name][0], described
            if name.startswith("values"):
                theirs, ours = ([shape for _, shape in both] for both in (theirs, ours))
            assert theirs == ours, f"{name} on {other}, and on {first}"
    compare(
        {
            backend: Measurement(
                {name: numbers for name, (_, numbers) in own.items()},
                precisions,
            )
            for backend, own in arrays.items()
        },
        missing=(),
    )


def overflows(program: Program, answer: list[tuple[list, np.ndarray]]) -> bool:
    """Return whether a program may overflow float16."""
    narrow = any(dtype == "float16" for _, dtype in program.inputs)
    return narrow and not all(np.all(np.abs(numbers) < 1e4) for _, numbers in answer)


@pytest.mark.skipif(len(INSTALLED) < 2, reason=f"only {INSTALLED} installed, which cannot be compared")
def test_programs_are_the_same_on_each_backend(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    programs = [draw(random.Random(seed)) for seed in range(COUNT)]
    source = tmp_path / "programs"
    source.write_bytes(pickle.dumps(programs))
    every = {name: measured(name, source, tmp_path / name) for name in INSTALLED}
    kept = [i for i in range(COUNT) if not overflows(programs[i], every[INSTALLED[0]][i])]
    assert len(kept) > 0.9 * COUNT
    programs = [programs[i] for i in kept]
    answers = {name: [own[i] for i in kept] for name, own in every.items()}
    require_alike(programs, answers)

    # Exchanged gradients would be found.
    place = next(i for i, own in enumerate(answers[INSTALLED[0]]) if len(set(own[1][1])) > 1)
    described, numbers = answers[INSTALLED[-1]][place][1]
    answers[INSTALLED[-1]][place][1] = (described, numbers[::-1])
    with pytest.raises(AssertionError, match=f"gradients of program {place}"):
        require_alike(programs, answers)


def main(source: str, answers: str) -> None:
    """Run programs on the active backend."""
    from meanings import described, gradients_of, numbers, with_ops

    from multigrad import backend

    with backend.active.wide(), backend.active.without_compilation():
        found = [
            [(described(tensors), numbers(tensors)) for tensors in gradients_of(program, with_ops)]
            for program in pickle.loads(Path(source).read_bytes())
        ]
    Path(answers).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
