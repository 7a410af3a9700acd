"""The `multigrad` command. Neither Keras nor a framework is imported until a command needs it."""

import argparse
import os
import sys
from collections.abc import Sequence

import multigrad
from multigrad.cli.doctor import doctor
from multigrad.cli.explain import explain
from multigrad.frameworks import DIFFERENTIATING


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run a command.

    ```python
    from multigrad.cli.main import main

    status = main(["doctor"])
    ```

    Arguments:
        arguments: the arguments after `multigrad`. The default is `sys.argv[1:]`.

    Returns:
        The exit status: 0 on success, 1 if the command found a problem.

    Raises:
        SystemExit: with status 2 if the arguments are invalid.
    """
    options = _parser().parse_args(arguments)
    try:
        status = _run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # `multigrad explain | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout when it exits
        return 1
    return status


def _run(options: argparse.Namespace) -> int:
    if options.command == "demo":
        # Imported here because it needs rich, which `doctor` must not require.
        from multigrad.cli.demo.command import demo

        return demo(options.backend)
    if options.command == "explain":
        return explain(" ".join(options.words))
    return doctor()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="multigrad",
        description="Custom gradients for Keras 3: one definition for TensorFlow, JAX and PyTorch.",
    )
    parser.add_argument("--version", action="version", version=f"multigrad {multigrad.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    demo_parser = commands.add_parser(
        "demo",
        help="run the same custom gradients on each installed backend and compare the results",
        description="Run three experiments on each installed backend, in one process per backend: "
        "log1pexp at 100, a chain of squares, and a digit classifier with 3-bit activations. "
        "Exit with status 1 if a result is wrong.",
    )
    demo_parser.add_argument(
        "--backend",
        metavar="NAME",
        choices=DIFFERENTIATING,
        help=f"run this backend only: {', '.join(DIFFERENTIATING)}",
    )
    explain_parser = commands.add_parser(
        "explain",
        help="print the section of the documentation that an error names, or that has these words",
        description="Print a section of the documentation: a limit, a guide or an answer. Words list the "
        "sections that have them. Without a name, list all sections. Exit with status 1 if there is none.",
    )
    explain_parser.add_argument(
        "words",
        metavar="NAME",
        nargs="*",
        help="a section, such as jax#forward-mode or forward-mode, a page, such as jax, or words",
    )
    commands.add_parser(
        "doctor",
        help="print versions, the installed backends and the active backend",
        description="Print the versions of Python, multigrad, Keras and each framework, and the active "
        "backend, without importing any of them. Exit with status 1 if the active backend cannot be "
        "imported.",
    )
    return parser
