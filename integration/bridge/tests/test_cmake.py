"""The CMake packages: versions, refused environments, targets in other directories, install() and export."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[3]
HEAD = "cmake_minimum_required(VERSION 3.20)\nproject(host CXX)\n"


def tool(name: str) -> str:
    return shutil.which(name) or str(Path(sys.executable).parent / name)


def cmake_dir(package: str = "xllm_executor") -> str:
    command = [sys.executable, "-m", package, "--cmakedir"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def configure(folder: Path, text: str, *definitions: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    (folder / "CMakeLists.txt").write_text(HEAD + text)
    python = () if any("Python_EXECUTABLE" in definition for definition in definitions) else (sys.executable,)
    paths = [f"-DCMAKE_PREFIX_PATH={cmake_dir()};{cmake_dir('xllm_metadata')}"]
    paths += [f"-DPython_EXECUTABLE={path}" for path in python]
    command = [tool("cmake"), "-S", str(folder), "-B", str(folder / "build"), *paths, *definitions]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("package", ["xllm_executor", "xllm_metadata"])
def test_versions(tmp_path: Path, package: str) -> None:
    """One configuration asks for all versions."""
    wanted = {
        "0.1": True, "0.1.0": True, "0.1.0 EXACT": True, "0.1 EXACT": True, "0.1...0.2": True, "0...<0.2": True,
        "0.2": False, "0.1.1": False, "0.0": False, "1.0": False, "0": False, "0.2 EXACT": False, "0...<0.1.0": False,
        "0.2...0.3": False, "0.0 EXACT": False,
    }  # fmt: skip
    lines = [f"set({package}_DIR)\nfind_package({package} {version} CONFIG QUIET)\n"
             f'message("<{version}> ${{{package}_FOUND}}")\n' for version in wanted]  # fmt: skip
    result = configure(tmp_path, "".join(lines))
    assert result.returncode == 0, result.stderr
    found = dict(re.findall(r"<(.*)> (\w+)", result.stderr))
    assert {version: found[version] in ("1", "TRUE") for version in wanted} == wanted


def test_the_version_is_that_of_the_packages() -> None:
    for package in ("executor", "metadata"):
        folder = REPO / "packages" / f"xllm-{package}"
        version = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"]
        text = (folder / f"src/xllm_{package}/cmake/xllm_{package}-config-version.cmake").read_text()
        assert f'set(PACKAGE_VERSION "{version}")' in text


FIND = "find_package(xllm_executor CONFIG REQUIRED)\n"
OLD_ABI = "has _GLIBCXX_USE_CXX11_ABI=1; this project's compiler and flags have not"


@pytest.mark.parametrize(
    ("text", "definitions", "message"),
    [
        (FIND, ["-DCMAKE_CXX_FLAGS=-D_GLIBCXX_USE_CXX11_ABI=0"], OLD_ABI),
        ("add_compile_definitions(_GLIBCXX_USE_CXX11_ABI=0)\n" + FIND, [], OLD_ABI),
        ("add_definitions(-D_GLIBCXX_USE_CXX11_ABI=0)\n" + FIND, [], OLD_ABI),
        ("add_compile_options(-D_GLIBCXX_USE_CXX11_ABI=0)\n" + FIND, [], OLD_ABI),
        (FIND, ["-DPython_LIBRARY={static}"], "is a static libpython; torch needs a shared one"),
    ],
)
def test_an_environment_that_cannot_embed_is_refused(
    tmp_path: Path, text: str, definitions: list[str], message: str
) -> None:
    static = tmp_path / f"libpython{sys.version_info.major}.{sys.version_info.minor}.a"
    static.write_bytes(b"!<arch>\n")
    result = configure(tmp_path / "p", text, *(part.format(static=static) for part in definitions))
    assert result.returncode != 0
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize("flags", ["-D_GLIBCXX_USE_CXX11_ABI=1", "-Wall -Werror", "-std=c++17"])
def test_other_flags_are_accepted(tmp_path: Path, flags: str) -> None:
    result = configure(tmp_path, FIND, f"-DCMAKE_CXX_FLAGS={flags}")
    assert result.returncode == 0, result.stderr


def test_flags_that_change_are_seen(tmp_path: Path) -> None:
    assert configure(tmp_path, FIND).returncode == 0
    assert OLD_ABI in " ".join(configure(tmp_path, FIND, "-DCMAKE_CXX_FLAGS=-D_GLIBCXX_USE_CXX11_ABI=0").stderr.split())
    assert configure(tmp_path, FIND, "-DCMAKE_CXX_FLAGS=").returncode == 0


def test_a_package_that_a_subdirectory_found_is_there_for_its_sibling(tmp_path: Path) -> None:
    for name, text in (("found", FIND), ("used", "add_library(used u.cpp)\n" + USE.replace("host", "used"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "CMakeLists.txt").write_text(text)
    (tmp_path / "used" / "u.cpp").write_text("#include <xllm_executor/executor.h>\n")
    text = "add_subdirectory(found)\nadd_subdirectory(used)\nadd_executable(host used/u.cpp)\n" + USE
    result = configure(tmp_path, text)
    assert result.returncode == 0, result.stderr


USE = "target_link_libraries(host PRIVATE xllm_executor::executor)\n"

HOST = """#include <xllm_executor/python_runtime.h>
void start() { xllm_executor::PythonRuntime::start(); }
"""
PROJECT = f"""{FIND}
set(CMAKE_CXX_STANDARD 17) # the targets raise it
add_library(framework STATIC framework.cpp)
target_link_libraries(framework PRIVATE xllm_executor::executor)
add_executable(host main.cpp)
target_link_libraries(host PRIVATE framework)
install(TARGETS framework host EXPORT framework)
install(EXPORT framework NAMESPACE framework:: DESTINATION cmake)
export(EXPORT framework NAMESPACE framework:: FILE framework-build.cmake)
"""


@pytest.mark.slow
def test_a_host_is_built_installed_moved_and_its_library_exported(
    tmp_path: Path, run_program: Callable[..., Any]
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "framework.cpp").write_text(HOST)
    (project / "main.cpp").write_text(
        'void start();\n#include <cstdio>\nint main() { start(); std::puts("started"); }\n'
    )
    unity = ["-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_BUILD_TYPE=Debug", f"-DCMAKE_INSTALL_PREFIX={tmp_path / 'installed'}"]
    result = configure(project, PROJECT, *unity)
    assert result.returncode == 0, result.stderr
    for command in (["--build", project / "build", "--parallel", "2"], ["--install", project / "build"]):
        result = subprocess.run([tool("cmake"), *map(str, command)], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    shutil.copytree(tmp_path / "installed", tmp_path / "moved")
    shutil.copy(project / "build" / "host", tmp_path / "copied")
    for program in (tmp_path / "installed/bin/host", tmp_path / "moved/bin/host", tmp_path / "copied"):
        started = run_program(program, LD_LIBRARY_PATH="")
        assert (started.returncode, started.stdout) == (0, "started\n"), started.stderr
    # A user of the library: its export names the package's target.
    shutil.rmtree(tmp_path / "installed")
    user = "include({})\nadd_executable(user {})\ntarget_link_libraries(user PRIVATE framework::framework)\n".format(
        tmp_path / "moved/cmake/framework.cmake", project / "main.cpp"
    )
    result = configure(tmp_path / "user", FIND + user)
    assert result.returncode == 0, result.stderr
