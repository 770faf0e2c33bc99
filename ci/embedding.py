"""Prints the CMake options for embedding the running Python, one per line: interpreter, shared library, headers.

CMake's FindPython needs the usual names and folders. Some hosts have only the versioned `libpython3.x.so.1.0`, or have
moved Python after it was built.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def first(paths: list[Path]) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def main() -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    configured = [Path(sysconfig.get_config_var(name) or "/") for name in ("LIBDIR", "LIBPL")]
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    base = Path(sys.base_prefix)
    folders = [base / "lib", *configured, configured[0] / multiarch, base / "lib" / multiarch]
    library = first([folder / f"libpython{version}.so{end}" for end in ("", ".1.0") for folder in folders])
    header = first([Path(sysconfig.get_path("include")) / "Python.h", base / f"include/python{version}/Python.h"])
    if library is None or header is None:
        missing = [name for name, path in (("a shared libpython", library), ("Python.h", header)) if path is None]
        sys.exit(f"{sys.executable} has no {' and no '.join(missing)}: a worker cannot embed it")
    print(f"-DPython_EXECUTABLE={sys.executable}")
    print(f"-DPython_LIBRARY={library}")
    print(f"-DPython_INCLUDE_DIR={header.parent}")


if __name__ == "__main__":
    main()
