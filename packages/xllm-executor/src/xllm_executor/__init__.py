"""`ModelExecutor`: what the C++ framework calls once per step, and the C++ bridge that makes the call.

Owns the configuration, the choice of runner, and the lifetime of backend and runners. Uses models and runners only
through their public interfaces.
"""

from .config import ExecutorConfig
from .executor import ModelExecutor
from .paths import get_cmake_dir

__all__ = ["ExecutorConfig", "ModelExecutor", "get_cmake_dir"]
