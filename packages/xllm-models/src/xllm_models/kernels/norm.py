# mypy: disallow-untyped-decorators=False
"""RMSNorm in Triton, alone and fused with the residual add, one program per row. Formula and rounding: `ops.norm`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xllm_attention.triton_launch import Launcher

from .block_sizes import num_warps_for, power_of_two
from .overlap import wait_for_previous
from .prefetch import prefetch_share, prefetch_shares


@triton.jit
def norm_of(
    value: tl.tensor,
    factor: tl.tensor,
    size: tl.constexpr,
    eps: tl.tensor,
    UNIT_OFFSET: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """RMSNorm of one fp32 row of `size` elements, zero-padded to the block, times the weight; rounded to `dtype`."""
    normed = value * tl.rsqrt(tl.sum(value * value, axis=0) / size + eps)
    if UNIT_OFFSET:
        result = normed * (1.0 + factor)
    else:
        result = factor * normed.to(dtype).to(tl.float32)
    return result.to(dtype)


@triton.jit
def _norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    prefetch: tl.tensor,
    prefetch_bytes: tl.tensor,
    prefetch_chunk: tl.tensor,
    eps: tl.tensor,
    x_stride: tl.constexpr,
    residual_stride: tl.constexpr,
    size: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    NUM_THREADS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    if OVERLAP:
        prefetch_share(prefetch, prefetch_bytes, prefetch_chunk, tl.program_id(0), NUM_THREADS)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    dtype = out.dtype.element_ty
    # Volatile loads, so that both are in flight together: the compiler would delay the first one until its use.
    factor = tl.load(weight + columns, mask=mask, other=0.0, volatile=True)
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0, volatile=True).to(tl.float32)
    factor = factor.to(tl.float32)
    if HAS_RESIDUAL:
        before = tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
        rounded = (value + before).to(dtype)
        tl.store(total + row * size + columns, rounded, mask=mask)
        value = rounded.to(tl.float32)
    tl.store(out + row * size + columns, norm_of(value, factor, size, eps, UNIT_OFFSET, dtype), mask=mask)


_launch = Launcher(triton.jit(_norm_kernel.fn, do_not_specialize=["prefetch_bytes", "prefetch_chunk"]), overlaps=True)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False) -> torch.Tensor:
    """See `ops.rms_norm`."""
    out = x.new_empty(x.shape)
    rows = _rows(x)
    if rows.shape[0]:
        _norm(rows, None, weight, out, out, None, eps, unit_offset)
    return out


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
    prefetch: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.fused_add_rms_norm`."""
    out = x.new_empty(x.shape)
    total = x.new_empty(x.shape)
    rows = _rows(x)
    if rows.shape[0]:
        _norm(rows, _rows(residual), weight, out, total, prefetch, eps, unit_offset)
    return out, total


def _norm(
    rows: torch.Tensor,
    before: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    prefetch: torch.Tensor | None,
    eps: float,
    unit_offset: bool,
) -> None:
    num_rows, size = rows.shape
    block = power_of_two(size)
    num_warps = num_warps_for(block)
    constants = (
        rows.stride(0), 0 if before is None else before.stride(0), size, block, before is not None, unit_offset,
        num_warps * 32,
    )  # fmt: skip
    tensors = (
        rows, rows if before is None else before, weight, out, total, weight if prefetch is None else prefetch,
    )  # fmt: skip
    scalars = (*prefetch_shares(prefetch, num_rows, num_rows), eps)
    _launch((num_rows, 1, 1), tensors, scalars, constants, num_warps=num_warps)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as [T, N] with contiguous rows; copied only if no view has them."""
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
