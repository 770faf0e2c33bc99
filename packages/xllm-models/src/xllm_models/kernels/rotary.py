# mypy: disallow-untyped-decorators=False
"""Rotary embedding in Triton, with or without the heads' norms before it: one program for some heads of a token.

Formulas and roundings are those of `ops.rotary` and `ops.norm`. H query heads, K kv heads, D head dim, R rotary
features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launcher import Launcher, power_of_two
from .overlap import wait_for_previous


@triton.jit
def _normed(
    value: tl.tensor, weight: tl.tensor, features: tl.tensor, mask: tl.tensor, scale: tl.tensor, NORM: tl.constexpr
) -> tl.tensor:
    """value [heads, features] fp32 of a norm whose reciprocal root is `scale` [heads, 1]; fp32 of rounded values."""
    dtype = weight.dtype.element_ty
    factor = tl.load(weight + features, mask=mask, other=0.0).to(tl.float32)[None, :]
    if NORM == "unit_offset":
        result = value * scale * (1.0 + factor)
    else:
        result = factor * (value * scale).to(dtype).to(tl.float32)
    return result.to(dtype).to(tl.float32)


@triton.jit
def _rotate_heads(
    source: tl.tensor,
    target: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    token: tl.tensor,
    block: tl.tensor,
    eps: tl.tensor,
    stride: tl.constexpr,
    head_stride: tl.constexpr,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    NORM: tl.constexpr,
) -> None:
    dtype = target.dtype.element_ty
    heads = block * HEADS + tl.arange(0, HEADS)
    low = tl.arange(0, HALF)
    high = half + low
    mask = (heads < num_heads)[:, None] & (low < half)[None, :]
    start = source + token * stride + heads[:, None] * head_stride
    first = tl.load(start + low[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(start + high[None, :], mask=mask, other=0.0).to(tl.float32)
    to = target + (token * num_heads + heads[:, None]) * head_dim
    if REST > 0:
        beyond = 2 * half + tl.arange(0, REST)
        rest_mask = (heads < num_heads)[:, None] & (beyond < head_dim)[None, :]
        rest = tl.load(start + beyond[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if NORM != "no":
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / head_dim + eps)[:, None]
        first = _normed(first, weight, low, low < half, scale, NORM)
        second = _normed(second, weight, high, low < half, scale, NORM)
        if REST > 0:
            rest = _normed(rest, weight, beyond, beyond < head_dim, scale, NORM)
    # Each product is rounded before the sum, as in HF transformers.
    rotated_first = (first * cos).to(dtype).to(tl.float32) - (second * sin).to(dtype).to(tl.float32)
    rotated_second = (second * cos).to(dtype).to(tl.float32) + (first * sin).to(dtype).to(tl.float32)
    tl.store(to + low[None, :], rotated_first.to(dtype), mask=mask)
    tl.store(to + high[None, :], rotated_second.to(dtype), mask=mask)
    if REST > 0:
        tl.store(to + beyond[None, :], rest.to(dtype), mask=rest_mask)


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
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    wait_for_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    position = tl.load(positions + token).to(tl.int64)
    features = tl.arange(0, HALF)
    table = cos_sin + position * (2 * half) + features
    dtype = q_out.dtype.element_ty
    cos = tl.load(table, mask=features < half, other=0.0).to(dtype).to(tl.float32)[None, :]
    sin = tl.load(table + half, mask=features < half, other=0.0).to(dtype).to(tl.float32)[None, :]
    q_blocks: tl.constexpr = (num_heads + HEADS - 1) // HEADS
    if block < q_blocks:
        _rotate_heads(
            q, q_out, q_weight, cos, sin, token, block, eps,
            q_stride, q_head_stride, num_heads, head_dim, half, HEADS, HALF, REST, NORM,
        )  # fmt: skip
    else:
        _rotate_heads(
            k, k_out, k_weight, cos, sin, token, block - q_blocks, eps,
            k_stride, k_head_stride, num_kv_heads, head_dim, half, HEADS, HALF, REST, NORM,
        )  # fmt: skip


_launch = Launcher(_rotary_kernel, overlaps=True)


def rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.rotary`."""
    return _run(q, k, q, k, positions, cos_sin, 0.0, "no")


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.qk_norm_rope`."""
    return _run(q, k, q_weight, k_weight, positions, cos_sin, eps, "unit_offset" if unit_offset else "weight")


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
    norm: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    q_out = q.new_empty(q.shape)
    k_out = k.new_empty(k.shape)
    num_tokens, num_heads, head_dim = q.shape
    if not num_tokens:
        return q_out, k_out
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    num_kv_heads, half = k.shape[1], cos_sin.shape[1] // 2
    # About 512 features a program: several warps a token in decode, few programs in prefill.
    heads = power_of_two(min(max(512 // head_dim, 1), num_heads))
    constants = (
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), num_heads, num_kv_heads, head_dim, half,
        heads, power_of_two(half), power_of_two(head_dim - 2 * half) if head_dim > 2 * half else 0, norm,
    )  # fmt: skip
    grid = (num_tokens, -(-num_heads // heads) + -(-num_kv_heads // heads), 1)
    tensors = (q, k, q_weight, k_weight, positions, cos_sin, q_out, k_out)
    _launch(grid, tensors, (eps,), constants, num_warps=2)
    return q_out, k_out
