"""Compute ops and collectives, registered under `torch.ops.xllm`.

Compute ops are functional and return contiguous tensors; only collectives named with a trailing underscore write to
their argument.
"""

from __future__ import annotations

from .activation import gelu_and_mul, silu_and_mul
from .collectives import (
    all_gather,
    all_reduce_,
    all_reduce_add_rms_norm_,
    broadcast_,
    group_stats,
    reduce_scatter,
    register_group,
    traffic,
    unregister_group,
)
from .embedding import embedding_shard
from .linear import linear
from .moe import fused_experts, topk_softmax
from .norm import fused_add_rms_norm, rms_norm
from .rotary import qk_norm_rope, rotary
from .symmetric import SymmetricTransport, missing_requirements
from .transports import Algorithm, GroupTransport, Transport, TransportRule

__all__ = [
    "Algorithm",
    "GroupTransport",
    "SymmetricTransport",
    "Transport",
    "TransportRule",
    "all_gather",
    "all_reduce_",
    "all_reduce_add_rms_norm_",
    "broadcast_",
    "embedding_shard",
    "fused_add_rms_norm",
    "fused_experts",
    "gelu_and_mul",
    "group_stats",
    "linear",
    "missing_requirements",
    "qk_norm_rope",
    "reduce_scatter",
    "register_group",
    "rms_norm",
    "rotary",
    "silu_and_mul",
    "topk_softmax",
    "traffic",
    "unregister_group",
]
