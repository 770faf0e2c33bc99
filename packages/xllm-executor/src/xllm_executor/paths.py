"""Path of the CMake package that ships with the bridge's sources."""

from __future__ import annotations

from pathlib import Path


def get_cmake_dir() -> str:
    """The folder that holds `xllm_executor-config.cmake`, for `CMAKE_PREFIX_PATH` or `xllm_executor_DIR`."""
    return str(Path(__file__).parent / "cmake")
