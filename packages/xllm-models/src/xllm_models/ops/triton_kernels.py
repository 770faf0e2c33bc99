"""Triton implementations of ops, imported at the first call.

Owns the lazy import. `xllm_attention.op_library` defines ops.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

# Op name to its Triton implementation.
TRITON_KERNELS: dict[str, LazyKernel] = {}


class LazyKernel:
    """Calls `xllm_models.kernels.<module>.<function>`, importing it, and Triton with it, at the first call."""

    def __init__(self, module: str, function: str) -> None:
        self._module = module
        self._function = function
        self._kernel: Callable[..., object] | None = None

    def __call__(self, *args: Any) -> object:
        if self._kernel is None:
            loaded: Callable[..., object] = getattr(
                import_module(f"xllm_models.kernels.{self._module}"), self._function
            )
            self._kernel = loaded
        return self._kernel(*args)


def triton_kernel(module: str, name: str) -> dict[str, Callable[..., object]]:
    """The `kernels` of `define_op` for an op that function `name` of `xllm_models.kernels.<module>` serves on CUDA."""
    kernel = LazyKernel(module, name)
    TRITON_KERNELS[name] = kernel
    return {"CUDA": kernel}
