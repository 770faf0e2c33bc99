# mypy: disallow-untyped-decorators=False
"""Gated activations in Triton. Formulas and rounding as in `ops.activation`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xllm_attention.triton_launch import Launcher

from .block_sizes import power_of_two
from .overlap import wait_for_previous
from .prefetch import prefetch_share, prefetch_shares


@triton.jit
def _activate(gate: tl.tensor, FUNCTION: tl.constexpr) -> tl.tensor:
    """fp32 -> fp32; FUNCTION is "silu", "tanh" (gelu, approximated) or "none" (gelu)."""
    if FUNCTION == "silu":
        return gate * tl.sigmoid(gate)
    if FUNCTION == "tanh":
        # 0.5 * (1 + tanh(u)) is sigmoid(2u), with u = sqrt(2 / pi) * (x + 0.044715 * x^3).
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))


@triton.jit
def _gated_kernel(
    x: tl.tensor,
    out: tl.tensor,
    prefetch: tl.tensor,
    prefetch_bytes: tl.tensor,
    prefetch_chunk: tl.tensor,
    x_stride: tl.constexpr,
    size: tl.constexpr,
    BLOCK: tl.constexpr,
    FUNCTION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    if OVERLAP:
        program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        prefetch_share(prefetch, prefetch_bytes, prefetch_chunk, program, 128)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(x + row * x_stride + columns, mask=mask, other=0.0)
    up = tl.load(x + row * x_stride + size + columns, mask=mask, other=0.0)
    active = _activate(gate.to(tl.float32), FUNCTION).to(gate.dtype)
    tl.store(out + row * size + columns, (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=mask)


_launch = Launcher(
    triton.jit(_gated_kernel.fn, do_not_specialize=["prefetch_bytes", "prefetch_chunk"]), overlaps=True, num_warps=4
)


def silu_and_mul(x: torch.Tensor, prefetch: torch.Tensor | None = None) -> torch.Tensor:
    """See `ops.silu_and_mul`."""
    return _gated("silu_and_mul", x, "silu", prefetch)


def gelu_and_mul(x: torch.Tensor, approximate: str, prefetch: torch.Tensor | None = None) -> torch.Tensor:
    """See `ops.gelu_and_mul`."""
    if approximate not in ("none", "tanh"):
        raise RuntimeError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    return _gated("gelu_and_mul", x, approximate, prefetch)


def _gated(name: str, x: torch.Tensor, function: str, prefetch: torch.Tensor | None) -> torch.Tensor:
    if x.shape[-1] % 2:
        raise ValueError(f"{name} needs an even last dimension, got {x.shape[-1]}")
    size = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], size))
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if rows.shape[0]:
        block = min(power_of_two(size), 1024)
        num_rows, num_blocks = rows.shape[0], -(-size // block)
        tensors = (rows, out, rows if prefetch is None else prefetch)
        scalars = prefetch_shares(prefetch, num_rows, num_rows * num_blocks)
        _launch((num_rows, num_blocks, 1), tensors, scalars, (rows.stride(0), size, block, function))
    return out
