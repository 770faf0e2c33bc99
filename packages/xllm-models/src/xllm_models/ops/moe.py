"""Mixture of experts as one op: top-k routing, the experts' gated MLPs and the weighted sum.

T tokens, E experts, k experts per token, N hidden, I features of one expert (on this rank).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from xllm_attention.op_library import define_op

from .triton_kernels import triton_kernel


def topk_softmax(router_logits: torch.Tensor, top_k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """router_logits [T, E] -> weights [T, k] in their dtype, and experts [T, k] int64. Softmax in fp32."""
    weights, experts = torch.topk(router_logits.softmax(-1, dtype=torch.float32), top_k, dim=-1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(router_logits.dtype), experts


def _expert(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """One expert: x [n, N], gate_up [2I, N], down [N, I] -> [n, N]."""
    gate, up = functional.linear(x, gate_up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, down)


def moe_static(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    normalize: bool,
) -> torch.Tensor:
    """Runs every expert on every token: E / k times the work, but no shape depends on data, so it can be captured."""
    weights, experts = topk_softmax(router_logits, top_k, normalize)
    total = x.new_zeros(x.shape, dtype=torch.float32)
    for index in range(gate_up.shape[0]):
        # A token selects an expert at most once, so the sum is that weight or 0.
        weight = (weights * (experts == index)).sum(-1, keepdim=True)
        total += _expert(x, gate_up[index], down[index]) * weight
    return total.to(x.dtype)


def _moe_cpu(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    normalize: bool,
) -> torch.Tensor:
    """Runs each expert on its own tokens. On the CPU, shapes that depend on data need no synchronization."""
    weights, experts = topk_softmax(router_logits, top_k, normalize)
    total = x.new_zeros(x.shape, dtype=torch.float32)
    order = experts.flatten().argsort(stable=True)
    counts = experts.flatten().bincount(minlength=gate_up.shape[0])
    for index, pairs in enumerate(torch.split(order, counts.tolist())):
        if len(pairs):
            tokens = pairs // top_k
            out = _expert(x[tokens], gate_up[index], down[index]) * weights.flatten()[pairs].unsqueeze(-1)
            total.index_add_(0, tokens, out.float())
    return total.to(x.dtype)


@define_op(kernels={"CPU": _moe_cpu, **triton_kernel("moe", "moe")})
def moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    normalize: bool,
) -> torch.Tensor:
    """sum over a token's top k experts of p_e * down_e(silu(gate_e(x)) * up_e(x)).

    x [T, N]; router_logits [T, E]; gate_up [E, 2I, N], per expert gate rows, then up rows; down [E, N, I]; p is the
    softmax over all experts, with `normalize` divided by its sum over the k. The sum is taken in fp32.
    """
    return moe_static(x, router_logits, gate_up, down, top_k, normalize)
