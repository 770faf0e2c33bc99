"""Prints, for CMake, a list: torch's folder; the folder of xllm_metadata's CMake package. Imports neither."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def package_dir(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        sys.exit(f"{sys.executable} has no package {name}")
    return Path(spec.origin).parent


sys.stdout.write(f"{package_dir('torch').as_posix()};{(package_dir('xllm_metadata') / 'cmake').as_posix()}")
