# mypy: disallow-untyped-decorators=False
"""Mixture of experts in Triton: two grouped GEMMs over the (token, expert) pairs, sorted by expert.

The host never reads a count back: it launches as many tiles as the shapes could need, and unused ones return at once.
`moe_align` assigns tiles to experts on the device. T tokens, k experts per token, P = T * k pairs, E experts, N hidden,
I features of one expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xllm_attention.triton_launch import Launcher

from ..ops.moe import ACTIVATIONS
from .moe_align import align_pairs


@triton.jit
def _tile_pairs(
    sorted_pairs: tl.tensor,
    pair_ends: tl.tensor,
    tile_ends: tl.tensor,
    tile: tl.tensor,
    expert: tl.tensor,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A tile's indices in the sorted order, the mask of valid ones, and the pairs at these indices."""
    tiles_before = tl.load(tile_ends + expert - 1, mask=expert > 0, other=0)
    first = tl.load(pair_ends + expert - 1, mask=expert > 0, other=0)
    indices = first + (tile - tiles_before) * ROWS + tl.arange(0, ROWS)
    inside = indices < tl.load(pair_ends + expert)
    return indices, inside, tl.load(sorted_pairs + indices, mask=inside, other=0)


@triton.jit
def _gate_up_kernel(
    x: tl.tensor,
    gate_up: tl.tensor,
    sorted_pairs: tl.tensor,
    pair_ends: tl.tensor,
    tile_ends: tl.tensor,
    tile_experts: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,  # [E, 2I]; read with BIASED only
    x_stride: tl.constexpr,
    num_experts: tl.constexpr,
    hidden: tl.constexpr,
    features: tl.constexpr,
    top_k: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BIASED: tl.constexpr,
    CLAMPED: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
) -> None:
    """out [P, I] in sorted order: silu(gate) * up, or with CLAMPED the "swigluoai" of `ops.moe.gated`."""
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile)
    if expert >= num_experts:
        return
    indices, inside, pairs = _tile_pairs(sorted_pairs, pair_ends, tile_ends, tile, expert, ROWS)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    wanted = columns < features
    rows = x + (pairs // top_k).to(tl.int64)[:, None] * x_stride
    gate_start = gate_up + (expert.to(tl.int64) * 2 * features + columns)[None, :] * hidden
    up_start = gate_start + features * hidden
    gate = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for begin in range(0, hidden, BLOCK_K):
        inner = begin + tl.arange(0, BLOCK_K)
        w_mask = (inner < hidden)[:, None] & wanted[None, :]
        value = tl.load(rows + inner[None, :], mask=inside[:, None] & (inner < hidden)[None, :], other=0.0)
        gate = tl.dot(
            value, tl.load(gate_start + inner[:, None], mask=w_mask, other=0.0), gate, input_precision=PRECISION
        )
        up = tl.dot(value, tl.load(up_start + inner[:, None], mask=w_mask, other=0.0), up, input_precision=PRECISION)
    dtype = out.dtype.element_ty
    if BIASED:
        biases = bias + expert.to(tl.int64) * 2 * features + columns
        gate += tl.load(biases, mask=wanted, other=0.0).to(tl.float32)[None, :]
        up += tl.load(biases + features, mask=wanted, other=0.0).to(tl.float32)[None, :]
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if CLAMPED:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = (tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0).to(dtype).to(tl.float32)
        active = (gate * tl.sigmoid(gate * alpha)).to(dtype).to(tl.float32)
    else:
        active = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    target = out + indices.to(tl.int64)[:, None] * features + columns[None, :]
    tl.store(target, (active * up).to(dtype), mask=inside[:, None] & wanted[None, :])


@triton.jit
def _down_kernel(
    inner_values: tl.tensor,
    down: tl.tensor,
    weights: tl.tensor,
    sorted_pairs: tl.tensor,
    pair_ends: tl.tensor,
    tile_ends: tl.tensor,
    tile_experts: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,  # [E, N]; read with BIASED only
    num_experts: tl.constexpr,
    hidden: tl.constexpr,
    features: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    """out [P, N] in the original order of the pairs: the weighted output of each pair's expert."""
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile)
    if expert >= num_experts:
        return
    indices, inside, pairs = _tile_pairs(sorted_pairs, pair_ends, tile_ends, tile, expert, ROWS)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    wanted = columns < hidden
    rows = inner_values + indices.to(tl.int64)[:, None] * features
    start = down + (expert.to(tl.int64) * hidden + columns)[None, :] * features
    total = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for begin in range(0, features, BLOCK_K):
        inner = begin + tl.arange(0, BLOCK_K)
        value = tl.load(rows + inner[None, :], mask=inside[:, None] & (inner < features)[None, :], other=0.0)
        w_mask = (inner < features)[:, None] & wanted[None, :]
        total = tl.dot(value, tl.load(start + inner[:, None], mask=w_mask, other=0.0), total, input_precision=PRECISION)
    dtype = out.dtype.element_ty
    if BIASED:
        total += tl.load(bias + expert.to(tl.int64) * hidden + columns, mask=wanted, other=0.0).to(tl.float32)[None, :]
    weight = tl.load(weights + pairs, mask=inside, other=0.0).to(tl.float32)
    weighted = total.to(dtype).to(tl.float32) * weight[:, None]
    target = out + pairs.to(tl.int64)[:, None] * hidden + columns[None, :]
    tl.store(target, weighted.to(dtype), mask=inside[:, None] & wanted[None, :])


@triton.jit
def _combine_kernel(
    values: tl.tensor, out: tl.tensor, hidden: tl.constexpr, top_k: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """out [T, N]: the fp32 sum over each token's pairs of values [P, N]."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for index in tl.static_range(0, top_k):
        row = values + (token * top_k + index) * hidden
        total += tl.load(row + columns, mask=columns < hidden, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + columns, total.to(out.dtype.element_ty), mask=columns < hidden)


_launch_gate_up = Launcher(_gate_up_kernel, num_warps=4)
_launch_down = Launcher(_down_kernel, num_warps=4)
_launch_combine = Launcher(_combine_kernel, num_warps=4)


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
    """See `ops.fused_experts`; weights and biases are contiguous."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} of experts is not supported; supported: {list(ACTIVATIONS)}")
    num_tokens, hidden = x.shape
    num_experts, _, features = down.shape
    top_k = topk_ids.shape[1]
    if not num_tokens:
        return torch.empty_like(x)
    x = x if x.stride(1) == 1 else x.contiguous()
    weights = topk_weights.contiguous()
    tiles = align_pairs(topk_ids.flatten().int(), num_experts)
    inner = torch.empty((num_tokens * top_k, features), dtype=x.dtype, device=x.device)
    outer = torch.empty((num_tokens * top_k, hidden), dtype=x.dtype, device=x.device)
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    # No measurement is recorded for these sizes, nor for 512 in the last launch.
    block_n, block_k = 64, 64
    _launch_gate_up(
        (tiles.count, -(-features // block_n), 1),
        (x, gate_up, *tiles.tensors, inner, gate_up if gate_up_bias is None else gate_up_bias),
        (),
        (
            *(x.stride(0), num_experts, hidden, features, top_k, tiles.rows, block_n, block_k, precision),
            *(gate_up_bias is not None, activation == "swigluoai", alpha, limit),
        ),
    )
    _launch_down(
        (tiles.count, -(-hidden // block_n), 1),
        (inner, down, weights, *tiles.tensors, outer, down if down_bias is None else down_bias),
        (),
        (num_experts, hidden, features, tiles.rows, block_n, block_k, precision, down_bias is not None),
    )
    out = x.new_empty(x.shape)
    _launch_combine((num_tokens, -(-hidden // 512), 1), (outer, out), (), (hidden, top_k, 512))
    return out
