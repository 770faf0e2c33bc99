"""Prints the options that let CMake embed the running Python, one a line: interpreter, shared library, headers.

CMake finds these itself where they have their usual names; a host's Python may have neither `libpython3.x.so`, beside
the versioned library, nor its files where it was built to have them.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def first(paths: list[Path]) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def main() -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    told = [Path(sysconfig.get_config_var(name) or "/") for name in ("LIBDIR", "LIBPL")]
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    base = Path(sys.base_prefix)
    folders = [base / "lib", *told, told[0] / multiarch, base / "lib" / multiarch]
    library = first([folder / f"libpython{version}.so{end}" for end in ("", ".1.0") for folder in folders])
    header = first([Path(sysconfig.get_path("include")) / "Python.h", base / f"include/python{version}/Python.h"])
    if library is None or header is None:
        lacking = [name for name, path in (("a shared libpython", library), ("Python.h", header)) if path is None]
        sys.exit(f"{sys.executable} has no {' and no '.join(lacking)}: a worker cannot embed it")
    print(f"-DPython_EXECUTABLE={sys.executable}")
    print(f"-DPython_LIBRARY={library}")
    print(f"-DPython_INCLUDE_DIR={header.parent}")


if __name__ == "__main__":
    main()
