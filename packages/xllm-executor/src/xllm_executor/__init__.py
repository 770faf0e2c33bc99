"""`ModelExecutor`: what the C++ framework calls once per step, and the C++ bridge that makes the call.

Owns the configuration, the choice of runner, and the lifetime of backend and runners. Uses models and runners only
through their public interfaces.

Imports torch on the first use of a class, so that `python -m xllm_executor doctor` runs where torch is broken.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .paths import get_cmake_dir

if TYPE_CHECKING:
    from .config import ExecutorConfig
    from .executor import ModelExecutor

__all__ = ["ExecutorConfig", "ModelExecutor", "get_cmake_dir"]

_MODULES = {"ExecutorConfig": ".config", "ModelExecutor": ".executor"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_MODULES[name], __name__), name)
    except AttributeError as error:  # of a broken torch; Python would take it for the absence of the class
        raise ImportError(f"{__name__}.{name} cannot be imported: {error}") from error
