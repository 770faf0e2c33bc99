# mypy: disallow-untyped-decorators=False
"""Small-batch matrix product x @ weight.T in Triton, for decode steps of up to `MAX_ROWS` rows; else torch's.

At these sizes the product is bound by reading the weight from memory. Each program streams some rows of the weight and
reads them once. Sums are taken in fp32 in an order that depends on shapes alone. M rows of x, N rows of the weight, K
features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from xllm_attention.triton_launch import Launcher

from .block_sizes import power_of_two
from .overlap import wait_for_previous

# All matrix products of a decode step of Qwen3-0.6B on an H200, in us, against torch's: 506 and 951 at 1 row, 613 and
# 764 at 8, 659 and 779 at 16 (benchmarks/results/ops-h200.json). Larger values were not measured.
MAX_ROWS = 16
_DTYPES = frozenset({torch.bfloat16, torch.float16})


@triton.jit
def _vector_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    w_stride: tl.constexpr,
    num_outputs: tl.constexpr,
    num_features: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One row of x: BLOCK_N outputs per program."""
    wait_for_previous(OVERLAP)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = outputs < num_outputs
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    start = weight + outputs.to(tl.int64)[:, None] * w_stride
    for begin in tl.static_range(0, num_features, BLOCK_K):
        features = begin + tl.arange(0, BLOCK_K)
        present = features < num_features
        value = tl.load(x + features, mask=present, other=0.0).to(tl.float32)
        rows = tl.load(start + features[None, :], mask=inside[:, None] & present[None, :], other=0.0)
        total += rows.to(tl.float32) * value[None, :]
    result = tl.sum(total, axis=1)
    if HAS_BIAS:
        result += tl.load(bias + outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + outputs, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rows_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.constexpr,
    w_stride: tl.constexpr,
    num_outputs: tl.constexpr,
    num_features: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Several rows of x: BLOCK_N outputs a program, whose warps share the features in SPLIT parts."""
    wait_for_previous(OVERLAP)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = outputs < num_outputs
    rows = tl.arange(0, ROWS)
    lanes = tl.arange(0, SPLIT)[:, None, None] * BLOCK_K
    w_features = lanes + tl.arange(0, BLOCK_K)[None, None, :]  # [SPLIT, 1, BLOCK_K]
    x_features = lanes + tl.arange(0, BLOCK_K)[None, :, None]  # [SPLIT, BLOCK_K, 1]
    w_start = weight + outputs.to(tl.int64)[None, :, None] * w_stride
    x_start = x + rows.to(tl.int64)[None, None, :] * x_stride
    total = tl.zeros((SPLIT, BLOCK_N, ROWS), dtype=tl.float32)
    for begin in range(0, num_features, SPLIT * BLOCK_K):
        w_mask = inside[None, :, None] & (begin + w_features < num_features)
        x_mask = (rows < num_rows)[None, None, :] & (begin + x_features < num_features)
        w_part = tl.load(w_start + begin + w_features, mask=w_mask, other=0.0)
        x_part = tl.load(x_start + begin + x_features, mask=x_mask, other=0.0)
        total = tl.dot(w_part, x_part, total, input_precision=PRECISION)
    result = tl.sum(total, axis=0)  # [BLOCK_N, ROWS]
    if HAS_BIAS:
        result += tl.load(bias + outputs, mask=inside, other=0.0).to(tl.float32)[:, None]
    target = out + rows.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    tl.store(target, result.to(out.dtype.element_ty), mask=inside[:, None] & (rows < num_rows)[None, :])


_launch_vector = Launcher(_vector_kernel, overlaps=True, num_warps=4)
_launch_rows = Launcher(triton.jit(_rows_kernel.fn, do_not_specialize=["num_rows"]), overlaps=True)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See `ops.linear`."""
    num_rows = x.shape[0]
    if x.ndim == 2 and 0 < num_rows <= MAX_ROWS and x.dtype in _DTYPES and x.stride(1) == 1 and weight.stride(1) == 1:
        return few_rows(x, weight, bias)
    return functional.linear(x, weight, bias)


def few_rows_tiles(num_outputs: int) -> tuple[int, int, int, int]:
    """(BLOCK_N, BLOCK_K, SPLIT, num_stages) of the kernel for 2 to `MAX_ROWS` rows; a program has SPLIT warps."""
    # One warp per program where the outputs give programs enough to fill the device. Otherwise each program splits the
    # features over two warps, to keep more of the weight in flight.
    # BLOCK_K is 256, so that a warp loads one row of the weight at a time. With 64, Triton 3.8 puts the split next to
    # the features in shared memory, and all rows of an ldmatrix fall into one bank: o_proj of Qwen3-0.6B took twice the
    # time at 16 rows. With 256, Triton 3.6 and 3.8 choose the same layout, and TPOT falls by 1 to 2 % on 3.6, too
    # (H200; benchmarks/results/sweep-h200.json and sweep-triton38-h200.json).
    return (16, 256, 1 if num_outputs >= 4096 else 2, 3)


def few_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [M, K], weight [N, K], both with contiguous rows, 1 <= M <= MAX_ROWS -> [M, N]."""
    num_rows, num_features = x.shape
    num_outputs = weight.shape[0]
    out = x.new_empty((num_rows, num_outputs))
    tensors = (x, weight, weight if bias is None else bias, out)
    if num_rows == 1:
        # No measurement is recorded for these block sizes.
        block_n, block_k = 2, min(power_of_two(num_features), 1024)
        constants: tuple[object, ...] = (
            weight.stride(0), num_outputs, num_features, block_n, block_k, bias is not None,
        )  # fmt: skip
        _launch_vector((-(-num_outputs // block_n), 1, 1), tensors, (), constants)
        return out
    rows = 8 if num_rows <= 8 else 16
    block_n, block_k, split, num_stages = few_rows_tiles(num_outputs)
    constants = (
        x.stride(0), weight.stride(0), num_outputs, num_features, rows, block_n, block_k, split,
        bias is not None, "ieee" if x.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    grid = (-(-num_outputs // block_n), 1, 1)
    _launch_rows(grid, tensors, (num_rows,), constants, num_warps=split, num_stages=num_stages)
    return out
