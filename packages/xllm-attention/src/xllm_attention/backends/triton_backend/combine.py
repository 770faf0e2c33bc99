"""Combines the partial results of chunks: inside the attention kernel, or in a kernel of its own for large tiles.

A tile's last program to finish combines a small tile. A latent tile of 64 rows of 512 has 128 KB per chunk: many
programs share it, each some of the rows. Legend as in `attend`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .worklist import CHUNKS, FIRST, ITEM_WIDTH, NUM_ROWS, TILE, TOKEN


@triton.jit  # type: ignore[untyped-decorator]
def combine_kernel(
    out_ptr: tl.tensor, items_ptr: tl.tensor, firsts_ptr: tl.tensor, partial_ptr: tl.tensor, state_ptr: tl.tensor,
    OUT_STRIDES: tl.constexpr, G: tl.constexpr, K: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    DECODE: tl.constexpr, BLOCK_M: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Merges ROWS rows of a tile that has several chunks.

    Grid: (K, sequences, R / ROWS) in decode, else (K, items that may be chunks, R / ROWS).
    """
    kv_head = tl.program_id(0).to(tl.int64)
    item = tl.program_id(1)
    if PDL:
        gdc_wait()
    if DECODE:
        item = tl.load(firsts_ptr + item)
    fields = items_ptr + item * ITEM_WIDTH
    chunks = tl.load(fields + CHUNKS)
    first = tl.load(fields + FIRST)
    first_token = tl.load(fields + TOKEN).to(tl.int64)
    tile = tl.load(fields + TILE)
    num_rows = tl.load(fields + NUM_ROWS)
    if (item == first) & (chunks > 1):
        combine(
            out_ptr, partial_ptr, state_ptr, first, chunks, kv_head, first_token, tile, num_rows,
            tl.program_id(2) * ROWS, OUT_STRIDES[0], OUT_STRIDES[1], OUT_STRIDES[2],
            G, K, D, D_PAD, BLOCK_M, R, ROWS, BLOCK_C,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def combine(
    out_ptr: tl.tensor, partial_ptr: tl.tensor, state_ptr: tl.tensor, first: tl.tensor, chunks: tl.tensor,
    kv_head: tl.tensor, first_token: tl.tensor, tile: tl.tensor, num_rows: tl.tensor, first_row: tl.tensor,
    out_stride_token: tl.tensor, out_stride_head: tl.tensor, out_stride_dim: tl.tensor,
    G: tl.constexpr, K: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, R: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    """Merges ROWS of the R kept rows of a tile's chunks, always in the same order, and writes the output.

    The block is one axis of ROWS * D_PAD columns, so that each thread loads the softmax states that it needs by itself.
    Loads bypass the L1 cache (`.cg`): other SMs have written the partial results.
    """
    column = tl.arange(0, ROWS * D_PAD)
    row_number = first_row + column // D_PAD
    element = column % D_PAD
    row_max = tl.full([ROWS * D_PAD], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS * D_PAD], tl.float32)
    acc = tl.zeros([ROWS * D_PAD], tl.float32)
    for start in range(0, chunks, BLOCK_C):
        new_max = row_max
        for number in tl.static_range(BLOCK_C):
            partial = (first + start + number).to(tl.int64) * K + kv_head
            exists = row_number < tl.where(start + number < chunks, R, 0)
            state = state_ptr + partial * 2 * R + row_number
            new_max = tl.maximum(new_max, tl.load(state, mask=exists, other=float("-inf"), cache_modifier=".cg"))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - base)
        acc *= rescale
        row_sum *= rescale
        row_max = new_max
        for number in tl.static_range(BLOCK_C):
            partial = (first + start + number).to(tl.int64) * K + kv_head
            exists = row_number < tl.where(start + number < chunks, R, 0)
            state = state_ptr + partial * 2 * R + row_number
            weight = tl.exp2(tl.load(state, mask=exists, other=float("-inf"), cache_modifier=".cg") - base)
            row_sum += weight * tl.load(state + R, mask=exists, other=0.0, cache_modifier=".cg")
            acc += weight * tl.load(
                partial_ptr + (partial * R + first_row) * D_PAD + column, mask=exists, other=0.0, cache_modifier=".cg"
            )
    result = acc / tl.where(row_sum == 0.0, 1.0, row_sum)
    row = tile * BLOCK_M + row_number
    tl.store(
        out_ptr
        + (first_token + row // G) * out_stride_token
        + (kv_head * G + row % G) * out_stride_head
        + element * out_stride_dim,
        result.to(out_ptr.dtype.element_ty),
        mask=(row < num_rows) & (element < D),
    )
