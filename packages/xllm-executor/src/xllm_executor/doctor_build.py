"""Checks of `doctor` for a C++ build: libpython, Python.h, compiler, CMake, build tool, and a test program."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

from .child import run_child

_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_CMAKE = (3, 20)

_CXX20 = """
#include <concepts>
#include <span>
#include <string>
#if __cplusplus < 202002L
#error "no C++20"
#endif
#if defined(__GLIBCXX__) && !_GLIBCXX_USE_CXX11_ABI
#error "the old libstdc++ ABI, which torch does not have"
#endif
template <std::integral T> int size(std::span<const T> values) { return static_cast<int>(values.size()); }
int main(int argc, char** argv) { return size<char>(std::string(argv[argc - 1], 0)); }
"""

# As the bridge starts the interpreter: the executable decides about the environment.
_EMBEDDING = """
#include <Python.h>
int main(int, char** argv) {
  PyConfig config;
  PyConfig_InitPythonConfig(&config);
  PyStatus status = PyConfig_SetBytesString(&config, &config.executable, argv[1]);
  if (!PyStatus_Exception(status)) status = Py_InitializeFromConfig(&config);
  if (PyStatus_Exception(status)) Py_ExitStatusException(status);
  int result = PyRun_SimpleString("import ctypes, math, sys; print(sys.prefix)");
  return Py_FinalizeEx() < 0 || result < 0;
}
"""

_LIBRARY_VERSION = """
import ctypes, sys
get = ctypes.CDLL(sys.argv[1]).Py_GetVersion
get.restype = ctypes.c_char_p
print(get().decode())
"""


class MissingError(Exception):
    """A requirement that is not there. `finding` says what was found, `remedy` what to install."""

    def __init__(self, finding: str, remedy: str) -> None:
        super().__init__(f"{finding}; {remedy}")
        self.finding = finding
        self.remedy = remedy


def find_libpython() -> str:
    """The path of a shared libpython that loads and has this interpreter's version."""
    remedy = f"install libpython{_VERSION}, or a Python that was built with --enable-shared"
    libdir, libpl = (Path(sysconfig.get_config_var(name) or "/") for name in ("LIBDIR", "LIBPL"))
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    base = Path(sys.base_prefix) / "lib"
    folders = dict.fromkeys([base, libdir, libpl, libdir / multiarch, base / multiarch])
    names = (f"libpython{_VERSION}.so", f"libpython{_VERSION}.so.1.0", f"libpython{_VERSION}.dylib")
    found = [folder / name for name in names for folder in folders if (folder / name).is_file()]
    if not found:
        static = next((path for folder in folders if (path := folder / f"libpython{_VERSION}.a").is_file()), None)
        searched = f"no libpython{_VERSION}.so in {', '.join(map(str, folders))}"
        raise MissingError(searched if static is None else f"{static} is static, and {searched}", remedy)
    output, fault = run_child([sys.executable, "-c", _LIBRARY_VERSION, str(found[0])])
    if fault:
        raise MissingError(f"{found[0]} cannot be loaded: {fault}", remedy)
    if output.split()[0] != sys.version.split()[0]:
        raise MissingError(f"{found[0]} is of Python {output.split()[0]}, not {sys.version.split()[0]}", remedy)
    return str(found[0])


def libpython() -> str:
    """Checks libpython; names the option for CMake when its name is not one that FindPython looks for."""
    path = find_libpython()
    return path if path.endswith((".so", ".dylib")) else f"{path}; pass -DPython_LIBRARY={path} to CMake"


def find_include_dir() -> str:
    """The folder of Python.h, of this interpreter's version."""
    remedy = f"install the headers: python{_VERSION}-dev (Debian) or python{_VERSION}-devel (Fedora)"
    folders = dict.fromkeys([sysconfig.get_path("include"), str(Path(sys.base_prefix) / f"include/python{_VERSION}")])
    folder = next((Path(folder) for folder in folders if (Path(folder) / "Python.h").is_file()), None)
    if folder is None:
        raise MissingError(f"no Python.h in {', '.join(folders)}", remedy)
    missing = [name for name in ("patchlevel.h", "pyconfig.h") if not (folder / name).is_file()]
    if missing:
        raise MissingError(f"{folder} has Python.h, but no {' and no '.join(missing)}", remedy)
    found = re.search(r'#define\s+PY_VERSION\s+"(\d+\.\d+)', (folder / "patchlevel.h").read_text(errors="replace"))
    if found is None or found[1] != _VERSION:
        raise MissingError(f"{folder} is of Python {found[1] if found else 'unknown'}, not {_VERSION}", remedy)
    return str(folder)


def find_compiler() -> list[str]:
    """The command of a compiler that compiles and links C++20 with the new libstdc++ ABI."""
    remedy = "install g++ 11 or later, or clang++ 14 or later"
    named = os.environ.get("CXX")
    command = named.split() if named else [next(filter(shutil.which, ("c++", "g++", "clang++")), "")]
    if not command or not shutil.which(command[0]):
        finding = f"CXX is {named}, which is not there" if named else "no c++, g++ or clang++ on the path"
        raise MissingError(finding, remedy)
    command += (os.environ.get("CXXFLAGS") or "").split()
    _, fault = _compile(command, _CXX20)
    if fault:
        raise MissingError(f"{' '.join(command)} does not compile C++20: {fault}", remedy)
    return command


def compiler() -> str:
    """Checks the compiler; returns its version."""
    command = find_compiler()
    version, _ = run_child([command[0], "--version"])
    return f"{shutil.which(command[0])}: {next(iter(version.splitlines()), 'no version')}"


def cmake() -> str:
    """Checks for CMake on the path or next to this interpreter."""
    remedy = f"install CMake {_CMAKE[0]}.{_CMAKE[1]} or later: pip install cmake"
    path = _tool("cmake")
    if path is None:
        raise MissingError("no cmake on the path", remedy)
    output, fault = run_child([path, "--version"])
    found = re.search(r"cmake version (\d+)\.(\d+)\S*", output)
    if fault or found is None:
        raise MissingError(f"{path} does not run: {fault or 'it prints no version'}", remedy)
    if (int(found[1]), int(found[2])) < _CMAKE:
        raise MissingError(f"{found[0]} at {path}", remedy)
    return f"{found[0]} at {path}"


def build_tool() -> str:
    """Checks for ninja or make."""
    faults = []
    for name in ("ninja", "make", "gmake"):
        path = _tool(name)
        if path is None:
            continue
        output, fault = run_child([path, "--version"])
        if not fault:
            return f"{path}: {output.splitlines()[0] if output else 'no version'}"
        faults.append(f"{path} does not run: {fault}")
    raise MissingError("; ".join(faults) or "no ninja or make on the path", "install ninja: pip install ninja")


def embedding() -> str:
    """Compiles, links and runs a program that starts this environment's interpreter."""
    try:
        library, include, command = find_libpython(), find_include_dir(), find_compiler()
    except MissingError as missing:
        raise MissingError("not tried, since another check fails", missing.remedy) from missing
    remedy = "install libpython, headers and compiler of one system"
    flags = [f"-I{include}", library, f"-Wl,-rpath,{Path(library).parent}"]
    output, fault = _compile(command, _EMBEDDING, *flags, run=[sys.executable])
    if fault:
        raise MissingError(f"a program that embeds Python fails: {fault}", remedy)
    if output.splitlines()[-1:] != [sys.prefix]:
        raise MissingError(f"the embedded interpreter has the prefix {output.strip()}, not {sys.prefix}", remedy)
    return f"a program with {library} starts {sys.executable}"


CHECKS: dict[str, Callable[[], str]] = {
    "libpython": libpython,
    "Python.h": find_include_dir,
    "compiler": compiler,
    "CMake": cmake,
    "build tool": build_tool,
    "embedding": embedding,
}
"""Each returns its finding, or raises `MissingError`."""


def _tool(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def _compile(command: list[str], source: str, *flags: str, run: list[str] | None = None) -> tuple[str, str]:
    """(stdout, fault) of the compiler, and of the program with the arguments `run` if they are given."""
    with tempfile.TemporaryDirectory() as folder:
        file, program = Path(folder) / "check.cpp", Path(folder) / "check"
        file.write_text(source)
        output, fault = run_child([*command, "-std=c++20", str(file), *flags, "-o", str(program)])
        if fault or run is None:
            return output, fault
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "PYTHONPATH")}
        return run_child([str(program), *run], environment)
