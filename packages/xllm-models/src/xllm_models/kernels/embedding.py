# mypy: disallow-untyped-decorators=False
"""One rank's shard of an embedding in Triton, one program per block of a token's row. Formula as in `ops.embedding`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xllm_attention.triton_launch import Launcher

from .block_sizes import power_of_two
from .overlap import wait_for_previous


@triton.jit
def _shard_kernel(
    input_ids: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.constexpr,
    column_stride: tl.constexpr,
    size: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    wait_for_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # int64: a vocabulary can have more elements than int32 can index.
    token_id = tl.load(input_ids + token).to(tl.int64)
    row = token_id - start
    width = tl.where((row >= 0) & (row < count), size, 0)  # 0: no lane is loaded
    absent = tl.where((token_id >= 0) & (token_id < vocab_size), 0.0, float("nan"))
    value = tl.load(weight + row * row_stride + columns * column_stride, mask=columns < width, other=absent)
    tl.store(out + token * size + columns, value, mask=columns < size)


_launch = Launcher(
    triton.jit(_shard_kernel.fn, do_not_specialize=["start", "count", "vocab_size"]), overlaps=True, num_warps=4
)


def embedding_shard(
    input_ids: torch.Tensor, weight: torch.Tensor, start: int, count: int, vocab_size: int
) -> torch.Tensor:
    """See `ops.embedding_shard`."""
    size = weight.shape[1]
    out = weight.new_empty((*input_ids.shape, size))
    if out.numel():
        block = min(power_of_two(size), 1024)
        constants = (weight.stride(0), weight.stride(1), size, block)
        tensors = (input_ids.contiguous(), weight, out)
        _launch((input_ids.numel(), -(-size // block), 1), tensors, (start, count, vocab_size), constants)
    return out
