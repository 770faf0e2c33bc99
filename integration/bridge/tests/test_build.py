"""Builds of the bridge with another generator, another CMake and Debug; versions and metadata of the packages."""

from __future__ import annotations

import os
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
PACKAGES = ("metadata", "attention", "graph", "models", "executor")


def project(package: str) -> dict[str, Any]:
    return tomllib.loads((REPO / "packages" / f"xllm-{package}" / "pyproject.toml").read_text())["project"]  # type: ignore[no-any-return]


def test_debug_with_make_and_the_systems_cmake(tmp_path: Path, run_program: Callable[..., Any]) -> None:
    """The CMake on the path outside of the environment where there is one, which is older than the environment's."""
    scripts = Path(sys.executable).parent
    path = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if Path(part) != scripts)
    cmake = shutil.which("cmake", path=path) or shutil.which("cmake")
    assert cmake is not None
    source = tmp_path / "host"
    shutil.copytree(REPO / "integration" / "bridge", source, ignore=shutil.ignore_patterns("tests", "recorder"))
    cmakedir = subprocess.run(
        [sys.executable, "-m", "xllm_executor", "--cmakedir"], capture_output=True, text=True, check=True
    ).stdout.strip()
    configure = [
        *(cmake, "-G", "Unix Makefiles", "-S", source, "-B", tmp_path / "build", "-DCMAKE_BUILD_TYPE=Debug"),
        *(f"-DPython_EXECUTABLE={sys.executable}", f"-Dxllm_executor_DIR={cmakedir}", "-DCMAKE_UNITY_BUILD=ON"),
    ]
    build = [cmake, "--build", tmp_path / "build", "--target", "bridge_host", "--parallel", "2"]
    for command in (configure, build):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    started = run_program(tmp_path / "build" / "bridge_host", "nowhere", sys.executable, ".", "start")
    assert started.returncode == 0, started.stderr
    assert '"executable"' in started.stdout


def test_an_environment_without_the_packages_is_named(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(t CXX)\nfind_package(xllm_executor CONFIG REQUIRED)\n"
    )
    python = tmp_path / "bare" / "bin" / "python"
    cmake_dir = REPO / "packages" / "xllm-executor" / "src" / "xllm_executor" / "cmake"
    cmake = shutil.which("cmake") or str(Path(sys.executable).parent / "cmake")
    definitions = (f"-DPython_EXECUTABLE={python}", f"-Dxllm_executor_DIR={cmake_dir}")
    result = subprocess.run(
        [cmake, "-S", tmp_path, "-B", tmp_path / "b", *definitions],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert re.search(r"cannot locate torch and\s+xllm-metadata", result.stderr), result.stderr
    assert "has no package torch" in result.stderr


def test_versions_are_in_lockstep() -> None:
    versions = {project(package)["version"] for package in PACKAGES}
    assert len(versions) == 1
    (version,) = versions
    pins = [pin for package in PACKAGES for pin in project(package)["dependencies"] if pin.startswith("xllm-")]
    assert pins
    assert all(pin.endswith(f"=={version}") for pin in pins), pins


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_the_licence_and_its_readme(package: str) -> None:
    folder = REPO / "packages" / f"xllm-{package}"
    assert (folder / "LICENSE").read_bytes() == (REPO / "LICENSE").read_bytes()
    assert (folder / "README.md").read_text().startswith(f"# xllm-{package}\n")
    assert (folder / "src" / f"xllm_{package}" / "py.typed").is_file()
    assert "torch>=2.11" in project(package)["dependencies"]


def test_readme_commands_are_what_ci_runs() -> None:
    commands = re.findall(r"^    (python3 ci/nox\.py.*)$", (REPO / "README.md").read_text(), re.MULTILINE)
    script = (REPO / ".ci" / "run").read_text()
    assert commands == ["python3 ci/nox.py -s demo", "python3 ci/nox.py"]
    assert all(command in script for command in commands)
