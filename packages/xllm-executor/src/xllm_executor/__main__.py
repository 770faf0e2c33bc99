"""`python -m xllm_executor --cmakedir | doctor`: for C++ builds, and for finding what is wrong with an installation."""

from __future__ import annotations

import argparse
import sys

from .paths import get_cmake_dir


def main() -> int:
    """Prints what was asked for; `doctor` exits with 1 when it found a fault."""
    parser = argparse.ArgumentParser(prog="python -m xllm_executor", description=__doc__)
    parser.add_argument("--cmakedir", action="store_true", help="print the folder of the CMake package")
    parser.add_argument("command", nargs="?", choices=["doctor"], help="check this environment")
    arguments = parser.parse_args()
    if arguments.cmakedir == (arguments.command is not None):
        parser.error("give either --cmakedir or doctor")
    if arguments.cmakedir:
        print(get_cmake_dir())
        return 0
    from .doctor import examine

    checks = examine()
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{'ok  ' if check.ok else 'FAIL'} {check.name.ljust(width)}  {check.finding}")
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
