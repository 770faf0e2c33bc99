"""Defines the ops `torch.ops.xllm.attention` and `state_layer`, through which models call the current backend.

Owns their dispatch to the current backend. Both are opaque to torch.compile and tagged `cudagraph_unsafe`, so that
piecewise capture ends there.
"""

from __future__ import annotations

import torch

from .context import current_backend
from .op_library import define_op


@define_op(mutates=["out"], tags=[torch.Tag.cudagraph_unsafe])
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    layer_id: int,
    sinks: torch.Tensor | None = None,
) -> None:
    """Appends k, v to layer `layer_id`'s cache, attends, and writes `out`; all by the current backend.

    T tokens, H heads, K kv heads, D head dim, V value head dim: q [T, H, D], k [T, K, D], v [T, K, V], out [T, H, V],
    any strides. In a latent layer v is k[..., :V].
    sinks: contiguous [H] in q's dtype for a layer whose spec has them.

    Raises:
        RuntimeError: outside of a forward context, or before the step was planned.
    """
    current_backend().run(q, k, v, out, layer_id, sinks)


@define_op(mutates=["out"], tags=[torch.Tag.cudagraph_unsafe])
def state_layer(inputs: list[torch.Tensor], out: torch.Tensor, layer_id: int) -> None:
    """Runs the layer with state `layer_id`: reads the sequences' states, writes `out` and the new states.

    Raises:
        RuntimeError: outside of a forward context, or before the step was planned.
        ValueError: the layer has no state.
    """
    current_backend().run_state(inputs, out, layer_id)
