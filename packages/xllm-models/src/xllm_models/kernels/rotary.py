# mypy: disallow-untyped-decorators=False
"""Rotary embedding in Triton, with or without the RMSNorm of the heads before it: one program per block of heads.

Formulas and rounding as in `ops.rotary` and `ops.norm`. H query heads, K kv heads, D head dim, R rotary
features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xllm_attention.triton_launch import Launcher

from .block_sizes import power_of_two
from .overlap import wait_for_previous


@triton.jit
def _normed(
    value: tl.tensor, factor: tl.tensor, scale: tl.tensor, dtype: tl.constexpr, NORM: tl.constexpr
) -> tl.tensor:
    """value [heads, features] * scale [heads, 1] * weight, all fp32; rounded to `dtype` and returned as fp32."""
    if NORM == "unit_offset":
        result = value * scale * (1.0 + factor)
    else:
        result = factor * (value * scale).to(dtype).to(tl.float32)
    return result.to(dtype).to(tl.float32)


@triton.jit
def _rotary_kernel(
    q: tl.tensor,
    k: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    eps: tl.tensor,
    q_stride: tl.constexpr,
    q_head_stride: tl.constexpr,
    k_stride: tl.constexpr,
    k_head_stride: tl.constexpr,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    PAIR_STRIDE: tl.constexpr,
    PAIR_DISTANCE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """A program handles query heads or key heads. Pair i is features i * PAIR_STRIDE and that + PAIR_DISTANCE.

    In decode the number of dependent memory round trips decides the time. So all loads are issued before the first use;
    only those of cosine and sine depend on another load, the position. All values are loaded in the shape
    [heads, features]: a smaller shape would be broadcast through shared memory, with a barrier.
    """
    wait_for_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (num_heads + HEADS - 1) // HEADS
    is_query = block < q_blocks
    source = tl.where(is_query, q, k)
    target = tl.where(is_query, q_out, k_out)
    weight = tl.where(is_query, q_weight, k_weight)
    count = tl.where(is_query, num_heads, num_kv_heads)
    heads = (tl.where(is_query, block, block - q_blocks) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, HALF)[None, :] + tl.zeros_like(heads)
    low = pair * PAIR_STRIDE
    mask = (heads < count) & (pair < half)
    dtype: tl.constexpr = q_out.dtype.element_ty
    start = source + (
        token * tl.where(is_query, q_stride, k_stride) + heads * tl.where(is_query, q_head_stride, k_head_stride)
    )
    first = tl.load(start + low, mask=mask, other=0.0)
    second = tl.load(start + (low + PAIR_DISTANCE), mask=mask, other=0.0)
    if NORM != "none":
        first_factor = tl.load(weight + low, mask=mask, other=0.0)
        second_factor = tl.load(weight + (low + PAIR_DISTANCE), mask=mask, other=0.0)
    if REST > 0:
        rest_columns = 2 * half + tl.arange(0, REST)[None, :] + tl.zeros_like(heads)
        rest_mask = (heads < count) & (rest_columns < head_dim)
        rest = tl.load(start + rest_columns, mask=rest_mask, other=0.0)
        if NORM != "none":
            rest_factor = tl.load(weight + rest_columns, mask=rest_mask, other=0.0)
    position = tl.load(positions + token).to(tl.int64)
    table = cos_sin + position * (2 * half) + pair
    cos = tl.load(table, mask=mask, other=0.0)
    sin = tl.load(table + half, mask=mask, other=0.0)

    first, second = first.to(tl.float32), second.to(tl.float32)
    if REST > 0:
        rest = rest.to(tl.float32)
    if NORM != "none":
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / head_dim + eps)[:, None]
        first = _normed(first, first_factor.to(tl.float32), scale, dtype, NORM)
        second = _normed(second, second_factor.to(tl.float32), scale, dtype, NORM)
        if REST > 0:
            rest = _normed(rest, rest_factor.to(tl.float32), scale, dtype, NORM)
    cos, sin = cos.to(dtype).to(tl.float32), sin.to(dtype).to(tl.float32)
    # Each product is rounded before the sum, as in HF transformers.
    rotated_first = (first * cos).to(dtype).to(tl.float32) - (second * sin).to(dtype).to(tl.float32)
    rotated_second = (second * cos).to(dtype).to(tl.float32) + (first * sin).to(dtype).to(tl.float32)
    out = target + (token * count + heads) * head_dim
    tl.store(out + low, rotated_first.to(dtype), mask=mask)
    tl.store(out + (low + PAIR_DISTANCE), rotated_second.to(dtype), mask=mask)
    if REST > 0:
        tl.store(out + rest_columns, rest.to(dtype), mask=rest_mask)


_launch = Launcher(_rotary_kernel, overlaps=True)


def rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.rotary`."""
    return _run(q, k, q, k, positions, cos_sin, 0.0, "none", interleaved)


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.qk_norm_rope`."""
    norm = "unit_offset" if unit_offset else "weight"
    return _run(q, k, q_weight, k_weight, positions, cos_sin, eps, norm, interleaved)


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
    norm: str,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    q_out = q.new_empty(q.shape)
    k_out = k.new_empty(k.shape)
    num_tokens, num_heads, head_dim = q.shape
    if not num_tokens:
        return q_out, k_out
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    num_kv_heads, half = k.shape[1], cos_sin.shape[1] // 2
    # About 512 features per program: several programs per token in decode, few in prefill. No measurement is recorded.
    heads = power_of_two(min(max(512 // head_dim, 1), num_heads))
    constants = (
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), num_heads, num_kv_heads, head_dim, half,
        *((2, 1) if interleaved else (1, half)),
        heads, power_of_two(half), power_of_two(head_dim - 2 * half) if head_dim > 2 * half else 0, norm,
    )  # fmt: skip
    grid = (num_tokens, -(-num_heads // heads) + -(-num_kv_heads // heads), 1)
    tensors = (q, k, q_weight, k_weight, positions, cos_sin, q_out, k_out)
    _launch(grid, tensors, (eps,), constants, num_warps=2)
    return q_out, k_out
