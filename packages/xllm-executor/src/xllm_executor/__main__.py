"""`python -m xllm_executor --cmakedir | doctor | check`: finds the CMake package, checks an environment or a model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import check, doctor
from .paths import get_cmake_dir


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and prints its result. Returns 1 for a fault that it found, 2 for unusable input."""
    parser = argparse.ArgumentParser(prog="python -m xllm_executor", description=__doc__)
    parser.add_argument("--cmakedir", action="store_true", help="print the directory of the CMake package")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("doctor", help="check this environment")
    check.add_arguments(commands.add_parser("check", help="check a model under graphs and over ranks"))
    arguments = parser.parse_args(argv)
    if arguments.cmakedir == (arguments.command is not None):
        parser.error("give either --cmakedir or a command, doctor or check")
    if arguments.cmakedir:
        print(get_cmake_dir())
        return 0
    if arguments.command == "doctor":
        return _doctor()
    try:
        return check.run(arguments, lambda line: print(line, flush=True))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _doctor() -> int:
    checks = doctor.examine()
    width = max(len(found.name) for found in checks)
    for found in checks:
        print(f"{'ok  ' if found.ok else 'FAIL'} {found.name.ljust(width)}  {found.finding}")
    return 0 if all(found.ok for found in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
