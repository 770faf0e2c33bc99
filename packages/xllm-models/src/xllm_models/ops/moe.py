"""Mixture of experts: top-k routing by softmax, and the experts' gated MLPs with the weighted sum.

The two are separate ops, so that a family with another routing (sigmoid scores, groups of experts) uses the same
experts. T tokens, E experts, k experts per token, N hidden, I features of one expert (on this rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from xllm_attention.op_library import define_op

from .triton_kernels import triton_kernel


def _fake_topk(router_logits: torch.Tensor, top_k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (router_logits.shape[0], top_k)
    return router_logits.new_empty(shape), router_logits.new_empty(shape, dtype=torch.int32)


@define_op(kernels=triton_kernel("moe_align", "topk_softmax"), fake=_fake_topk)
def topk_softmax(router_logits: torch.Tensor, top_k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """router_logits [T, E] -> (weights [T, k] in their dtype, ids [T, k] int32) of the k most probable experts.

    The softmax over all E experts is computed in fp32. With `normalize` the k weights are divided by their sum.
    """
    weights, ids = torch.topk(router_logits.softmax(-1, dtype=torch.float32), top_k, dim=-1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(router_logits.dtype), ids.int()


ACTIVATIONS: Final = ("silu", "swigluoai")


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str, alpha: float, limit: float) -> torch.Tensor:
    """The gated activation of `fused_experts`, [..., I] each.

    "silu" is silu(gate) * up. "swigluoai" is the clamped SwiGLU of gpt-oss (vLLM's name), after HF transformers'
    GptOssExperts: gate is clamped to at most `limit`, up to -limit..limit, and the result is
    (up + 1) * gate * sigmoid(alpha * gate). `alpha` and `limit` are read by "swigluoai" only.
    """
    if activation == "silu":
        return functional.silu(gate) * up
    if activation == "swigluoai":
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))
    raise ValueError(f"activation {activation!r} of experts is not supported; supported: {list(ACTIVATIONS)}")


@dataclass(frozen=True, slots=True)
class _Experts:
    """The weights of all experts, and their activation."""

    gate_up: torch.Tensor  # [E, 2I, N]
    down: torch.Tensor  # [E, N, I]
    gate_up_bias: torch.Tensor | None  # [E, 2I]
    down_bias: torch.Tensor | None  # [E, N]
    activation: str
    alpha: float
    limit: float

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Expert `index`: x [n, N] -> [n, N]."""
        biases = (None if bias is None else bias[index] for bias in (self.gate_up_bias, self.down_bias))
        gate_up_bias, down_bias = biases
        gate, up = functional.linear(x, self.gate_up[index], gate_up_bias).chunk(2, dim=-1)
        inner = gated(gate, up, self.activation, self.alpha, self.limit)
        return functional.linear(inner, self.down[index], down_bias)


def fused_experts_static(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> torch.Tensor:
    """Runs every expert on every token: E / k times the work, but no shape depends on data, so it can be captured."""
    experts = _Experts(gate_up, down, gate_up_bias, down_bias, activation, alpha, limit)
    total = x.new_zeros(x.shape, dtype=torch.float32)
    for index in range(gate_up.shape[0]):
        # A token selects an expert at most once, so the sum is that weight or 0.
        weight = (topk_weights * (topk_ids == index)).sum(-1, keepdim=True)
        total += experts.run(index, x) * weight
    return total.to(x.dtype)


def _fused_experts_cpu(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> torch.Tensor:
    """Runs each expert on its own tokens. On the CPU, shapes that depend on data need no synchronization."""
    experts = _Experts(gate_up, down, gate_up_bias, down_bias, activation, alpha, limit)
    total = x.new_zeros(x.shape, dtype=torch.float32)
    order = topk_ids.flatten().argsort(stable=True)
    counts = topk_ids.flatten().bincount(minlength=gate_up.shape[0])
    for index, pairs in enumerate(torch.split(order, counts.tolist())):
        if len(pairs):
            tokens = pairs // topk_ids.shape[1]
            out = experts.run(index, x[tokens]) * topk_weights.flatten()[pairs].unsqueeze(-1)
            total.index_add_(0, tokens, out.float())
    return total.to(x.dtype)


@define_op(kernels={"CPU": _fused_experts_cpu, **triton_kernel("moe", "fused_experts")})
def fused_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> torch.Tensor:
    """sum over a token's k experts e of topk_weights_e * down_e(gated(gate_e(x), up_e(x))), taken in fp32.

    x [T, N]; topk_weights [T, k] in any float dtype; topk_ids [T, k] int32 or int64 in [0, E), without repetition in a
    row; gate_up [E, 2I, N], per expert gate rows, then up rows; down [E, N, I] -> [T, N] in x's dtype. Biases, in x's
    dtype: gate_up_bias [E, 2I] and down_bias [E, N]. `activation`, `alpha` and `limit` as in `gated`; another
    activation is a ValueError.
    """
    return fused_experts_static(
        x, topk_weights, topk_ids, gate_up, down, gate_up_bias, down_bias, activation, alpha, limit
    )
