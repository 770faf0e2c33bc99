"""The attention op, `torch.ops.xllm.attention`: the one point where a model meets a backend.

Owns its schema, its dispatch to the current backend and its fake. The op is opaque to torch.compile and tagged
`cudagraph_unsafe`, so that piecewise capture ends there.
"""

from __future__ import annotations

import torch

from .context import current_backend

# A fragment, since several packages define ops in the "xllm" namespace. Module-level: the ops live as long as it does.
_LIBRARY = torch.library.Library("xllm", "FRAGMENT")  # type: ignore[no-untyped-call]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer_id: int) -> None:
    """Appends k, v to layer `layer_id`'s cache, attends, and writes `out`; the current backend does it all.

    T tokens, H heads, K kv heads, D head dim: q [T, H, D], k and v [T, K, D], out [T, H, D], any strides.

    Raises:
        RuntimeError: outside of a forward context, or before the step was planned.
    """
    current_backend().run(q, k, v, out, layer_id)


def _attention_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer_id: int) -> None:
    """Nothing to infer: the op returns nothing and `out` exists."""


_LIBRARY.define(  # type: ignore[no-untyped-call]
    "attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int layer_id) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,),
)
_LIBRARY.impl("attention", attention, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("xllm::attention", _attention_fake, lib=_LIBRARY)
