"""The `xllm` op namespace as this package fills it: how an op is defined.

Owns the library fragment (other packages add to the same namespace) and `define_op`. Owns no op.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# A Library removes its ops when it is collected, so it lives as long as the module.
LIBRARY = torch.library.Library("xllm", "FRAGMENT")  # type: ignore[no-untyped-call]


def define_op(schema: str, implementation: Callable[..., object], fake: Callable[..., object]) -> Callable[..., object]:
    """Define `torch.ops.xllm.<name>` and return its overload.

    `implementation` serves every device. A device with a kernel of its own registers it later under its own
    dispatch key (`LIBRARY.impl(name, kernel, "CUDA")`), which PyTorch prefers; callers do not change.
    """
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"xllm::{name}", fake, lib=LIBRARY)
    overload: Callable[..., object] = getattr(torch.ops.xllm, name).default
    return overload
