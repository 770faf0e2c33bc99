"""Builds C++ projects for tests, with the cmake and ninja of the Python packages."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path


def tool(name: str) -> str:
    """cmake or ninja: those that came with the Python packages when they are there, else the system's."""
    spec = importlib.util.find_spec("cmake")
    if spec is not None and spec.origin is not None:
        candidate = Path(spec.origin).parents[4] / "bin" / name
        if candidate.is_file():
            return str(candidate)
    found = shutil.which(name)
    assert found, f"no {name} on the path"
    return found


def build_project(source: Path, folder: Path, *targets: str, flags: str, build_type: str) -> Path:
    """Configures the project in `folder` against this Python's packages, builds the targets, and returns `folder`.

    A warning of the compiler fails the test. Several sources are compiled in one go, in half of the time; one by one
    they are in the worker's build.
    """
    cmakedir = subprocess.run(
        [sys.executable, "-m", "xllm_executor", "--cmakedir"], capture_output=True, text=True, check=True
    ).stdout.strip()
    configure = [
        *(tool("cmake"), "-G", "Ninja", "-S", source, "-B", folder, f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"),
        *(f"-DCMAKE_BUILD_TYPE={build_type}", f"-DCMAKE_CXX_FLAGS={flags}"),
        *(f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_PREFIX_PATH={cmakedir}", "-DCMAKE_UNITY_BUILD=ON"),
    ]
    for command in (configure, [tool("cmake"), "--build", folder, "--target", *targets]):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "warning:" not in result.stdout + result.stderr, result.stdout
    return folder
