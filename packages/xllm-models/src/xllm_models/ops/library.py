"""How an op is defined.

Owns the library fragment (other packages add to the same namespace) and `define_op`. Owns no op.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

# A Library removes its ops when it is collected, so it lives as long as the module.
LIBRARY = torch.library.Library("xllm", "FRAGMENT")  # type: ignore[no-untyped-call]

# Name of an op to its Triton implementation, "module:function" under `xllm_models.kernels`.
TRITON_KERNELS: dict[str, str] = {}


def define_op(
    schema: str,
    implementation: Callable[..., object],
    fake: Callable[..., object],
    *,
    triton: str | None = None,
) -> Callable[..., object]:
    """Define `torch.ops.xllm.<name>` and return its overload.

    `implementation` serves every device, `triton` ("module:function" under `xllm_models.kernels`) CUDA, where PyTorch
    prefers it. Another device's kernel registers under its own dispatch key (`LIBRARY.impl(name, kernel, key)`);
    callers do not change.
    """
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"xllm::{name}", fake, lib=LIBRARY)
    if triton is not None:
        TRITON_KERNELS[name] = triton
        LIBRARY.impl(name, LazyKernel(triton), "CUDA")  # type: ignore[no-untyped-call]
    overload: Callable[..., object] = getattr(torch.ops.xllm, name).default
    return overload


class LazyKernel:
    """Calls `xllm_models.kernels.<module>:<function>`, importing it, and Triton with it, at the first call."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._kernel: Callable[..., object] | None = None

    def __call__(self, *args: Any) -> object:
        if self._kernel is None:
            module, _, function = self._target.partition(":")
            loaded: Callable[..., object] = getattr(import_module(f"xllm_models.kernels.{module}"), function)
            self._kernel = loaded
        return self._kernel(*args)
