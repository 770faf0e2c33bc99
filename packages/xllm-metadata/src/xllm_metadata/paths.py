"""Paths of the headers and CMake files that the package ships."""

from __future__ import annotations

from pathlib import Path


def get_include() -> str:
    """The folder for a C++ include path; headers are `xllm_metadata/*.h`."""
    return str(Path(__file__).parent / "include")


def get_cmake_dir() -> str:
    """The folder that holds `xllm_metadata-config.cmake`, for `CMAKE_PREFIX_PATH` or `xllm_metadata_DIR`."""
    return str(Path(__file__).parent / "cmake")
