"""The `multigrad` command. It imports neither Keras nor a framework."""

import argparse
import os
import sys
from collections.abc import Sequence

import multigrad
from multigrad.cli.doctor import doctor
from multigrad.cli.explain import explain


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
        status = explain(" ".join(options.words)) if options.command == "explain" else doctor()
        sys.stdout.flush()
    except BrokenPipeError:  # `multigrad explain | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout when it exits
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="multigrad",
        description="Custom gradients for Keras 3: one definition for TensorFlow, JAX and PyTorch.",
    )
    parser.add_argument("--version", action="version", version=f"multigrad {multigrad.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
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
        help="a section, such as limits#in-place, a page, such as limits, or words",
    )
    commands.add_parser(
        "doctor",
        help="print versions, the installed backends and the active backend",
        description="Print the versions of Python, multigrad, Keras and each framework, and the active "
        "backend, without importing any of them. Exit with status 1 if the active backend cannot be "
        "imported.",
    )
    return parser
