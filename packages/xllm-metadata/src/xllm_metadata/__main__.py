"""Prints the paths that a C++ build needs, and the contract's documentation."""

from __future__ import annotations

import argparse

from .docs import contract_page, fields_page
from .paths import get_cmake_dir, get_include


def main() -> None:
    """Prints the one requested item."""
    parser = argparse.ArgumentParser(prog="python -m xllm_metadata", description=__doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--include", action="store_true", help="print the folder of the C++ headers")
    group.add_argument("--cmakedir", action="store_true", help="print the folder of the CMake package")
    group.add_argument("--fields", action="store_true", help="print the field table of the step contract")
    group.add_argument("--page", action="store_true", help="print the whole contract in Markdown")
    arguments = parser.parse_args()
    if arguments.include:
        print(get_include())
    elif arguments.cmakedir:
        print(get_cmake_dir())
    elif arguments.page:
        print(contract_page(), end="")
    else:
        print(fields_page())


if __name__ == "__main__":
    main()
