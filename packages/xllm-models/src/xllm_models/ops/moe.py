"""Mixture of experts: top-k routing by softmax, and the experts' gated MLPs with the weighted sum.

The two are separate ops, so that a family with another routing (sigmoid scores, groups of experts) uses the same
experts. T tokens, E experts, k experts per token, N hidden, I features of one expert (on this rank).
"""

from __future__ import annotations

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


def _expert(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """One expert: x [n, N], gate_up [2I, N], down [N, I] -> [n, N]."""
    gate, up = functional.linear(x, gate_up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, down)


def fused_experts_static(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Runs every expert on every token: E / k times the work, but no shape depends on data, so it can be captured."""
    total = x.new_zeros(x.shape, dtype=torch.float32)
    for index in range(gate_up.shape[0]):
        # A token selects an expert at most once, so the sum is that weight or 0.
        weight = (topk_weights * (topk_ids == index)).sum(-1, keepdim=True)
        total += _expert(x, gate_up[index], down[index]) * weight
    return total.to(x.dtype)


def _fused_experts_cpu(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Runs each expert on its own tokens. On the CPU, shapes that depend on data need no synchronization."""
    total = x.new_zeros(x.shape, dtype=torch.float32)
    order = topk_ids.flatten().argsort(stable=True)
    counts = topk_ids.flatten().bincount(minlength=gate_up.shape[0])
    for index, pairs in enumerate(torch.split(order, counts.tolist())):
        if len(pairs):
            tokens = pairs // topk_ids.shape[1]
            out = _expert(x[tokens], gate_up[index], down[index]) * topk_weights.flatten()[pairs].unsqueeze(-1)
            total.index_add_(0, tokens, out.float())
    return total.to(x.dtype)


@define_op(kernels={"CPU": _fused_experts_cpu, **triton_kernel("moe", "fused_experts")})
def fused_experts(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """sum over a token's k experts e of topk_weights_e * down_e(silu(gate_e(x)) * up_e(x)), taken in fp32.

    x [T, N]; topk_weights [T, k] in any float dtype; topk_ids [T, k] int32 or int64 in [0, E), without repetition in a
    row; gate_up [E, 2I, N], per expert gate rows, then up rows; down [E, N, I] -> [T, N] in x's dtype.
    """
    return fused_experts_static(x, topk_weights, topk_ids, gate_up, down)
