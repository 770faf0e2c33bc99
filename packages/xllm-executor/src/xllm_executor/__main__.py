"""`python -m xllm_executor --cmakedir | doctor | check`: finds the CMake package, checks an environment or a model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from . import doctor
from .paths import get_cmake_dir


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and prints its result. Returns 1 for a fault that it found, 2 for unusable input."""
    parser = argparse.ArgumentParser(prog="python -m xllm_executor", description=__doc__)
    parser.add_argument("--cmakedir", action="store_true", help="print the directory of the CMake package")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    doctor_parser = commands.add_parser("doctor", help="check this environment")
    doctor_parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    check_parser = commands.add_parser("check", help="check a model under graphs and over ranks")
    argv = sys.argv[1:] if argv is None else argv
    if "check" in argv:
        from . import check  # imports torch, which may be broken where the doctor is asked

        check.add_arguments(check_parser)
    arguments = parser.parse_args(argv)
    if arguments.cmakedir == (arguments.command is not None):
        parser.error("give either --cmakedir or a command, doctor or check")
    if arguments.cmakedir:
        print(get_cmake_dir())
        return 0
    if arguments.command == "doctor":
        return _doctor(as_json=arguments.json)
    try:
        return check.run(arguments, lambda line: print(line, flush=True))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _doctor(*, as_json: bool) -> int:
    checks = doctor.examine()
    ok = all(found.ok for found in checks)
    if as_json:
        print(json.dumps({"ok": ok, "checks": [asdict(found) for found in checks]}, indent=2))
        return 0 if ok else 1
    width = max(len(found.name) for found in checks)
    for found in checks:
        print(f"{'ok  ' if found.ok else 'FAIL'} {found.name.ljust(width)}  {found.finding}")
        if found.remedy:
            print(f"     {' ' * width}  {found.remedy}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
