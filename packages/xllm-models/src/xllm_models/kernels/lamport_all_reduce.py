# mypy: disallow-untyped-decorators=False
"""One-shot all-reduce in Triton over symmetric memory, alone and fused with the residual add and RMSNorm after it.

Every rank writes its payload into a receive slot in every other rank's buffer (`symmetric_buffers`), then sums what it
received. No ready flag is needed. Each receive slot is pre-filled with a sentinel (all bits set, a NaN pattern; senders
replace such a NaN by another one). The receiver polls until the sentinel is gone. So a call costs one NVLink transfer;
with a flag it costs three: the write of the payload is acknowledged, the flag is written, the payload is read.

The slots are a triple buffer. A call uses the next slot and refills the slot of the previous call with the sentinel.
The other ranks write to that slot again two calls later. They reach that call only after this rank has sent its part of
the call in between, which it does after the refill.

The protocol is that of TensorRT-LLM's Lamport all-reduce. All programs of a call are resident before the next kernel
starts (`overlap`). So a program that polls cannot keep the programs it waits for off the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xllm_attention.triton_launch import Launcher

from .block_sizes import num_warps_for, power_of_two
from .norm import norm_of
from .overlap import wait_for_previous
from .prefetch import prefetch_share, prefetch_shares
from .symmetric_buffers import (
    NUM_PROGRAMS,
    SUM_CHUNK_BYTES,
    SUM_SLOTS,
    VECTOR_BYTES,
    SymmetricBuffers,
    sum_slots_offset,
)

_NUM_SLOTS = tl.constexpr(SUM_SLOTS)


@triton.jit
def _bits(value: tl.tensor) -> tl.tensor:
    return value.to(tl.int16 if value.dtype.primitive_bitwidth == 16 else tl.int32, bitcast=True)


@triton.jit
def _slot_pointer(
    addresses: tl.tensor,
    slot: tl.tensor,
    chunk_offset: tl.tensor,
    OWNER: tl.constexpr,
    SOURCE: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    SLOTS_OFFSET: tl.constexpr,
    SOURCE_STRIDE: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """In the buffer of rank OWNER, `chunk_offset` bytes into the part of the slot that rank SOURCE writes."""
    source = SOURCE - 1 if SOURCE > OWNER else SOURCE
    begin = SLOTS_OFFSET + (slot * (NUM_RANKS - 1) + source).to(tl.int64) * SOURCE_STRIDE + chunk_offset
    return tl.multiple_of((tl.load(addresses + OWNER) + begin).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _send(
    addresses: tl.tensor,
    slot: tl.tensor,
    chunk_offset: tl.tensor,
    offset: tl.tensor,
    value: tl.tensor,
    inside: tl.tensor,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    SLOTS_OFFSET: tl.constexpr,
    SOURCE_STRIDE: tl.constexpr,
) -> None:
    """Writes this rank's term to all others, `offset` elements into the chunk."""
    for peer in tl.static_range(NUM_RANKS):
        if peer != RANK:
            target = _slot_pointer(
                addresses, slot, chunk_offset, peer, RANK, NUM_RANKS, SLOTS_OFFSET, SOURCE_STRIDE, value.dtype
            )
            bits = _bits(value)
            bits = tl.where(bits == -1, bits - 1, bits)  # a NaN that equals the sentinel: another NaN instead
            tl.store(target + offset, bits.to(value.dtype, bitcast=True), mask=inside)


@triton.jit
def _receive_sum(
    addresses: tl.tensor,
    slot: tl.tensor,
    chunk_offset: tl.tensor,
    offset: tl.tensor,
    value: tl.tensor,
    inside: tl.tensor,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    SLOTS_OFFSET: tl.constexpr,
    SOURCE_STRIDE: tl.constexpr,
) -> tl.tensor:
    """Waits for the other ranks' terms; returns the sum of all terms, rounded to their dtype."""
    total = tl.zeros(value.shape, dtype=tl.float32)
    for peer in tl.static_range(NUM_RANKS):  # in the same order on every rank
        if peer == RANK:
            total += value.to(tl.float32)
        else:
            source = _slot_pointer(
                addresses, slot, chunk_offset, RANK, peer, NUM_RANKS, SLOTS_OFFSET, SOURCE_STRIDE, value.dtype
            )
            source += offset
            term = tl.load(source, mask=inside, other=0.0, volatile=True)
            while tl.max((_bits(term) == -1).to(tl.int32), 0) > 0:
                term = tl.load(source, mask=inside, other=0.0, volatile=True)
            total += term.to(tl.float32)
    return total.to(value.dtype)


@triton.jit
def _reset_previous_slot(
    addresses: tl.tensor,
    counts: tl.tensor,
    slot: tl.tensor,
    chunk_offset: tl.tensor,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    SLOTS_OFFSET: tl.constexpr,
    SOURCE_STRIDE: tl.constexpr,
    CHUNK_BYTES: tl.constexpr,
) -> None:
    """Refills the slot of the previous call with the sentinel, and advances the count.

    Whole chunks, since the previous call may have used more of them than this one.
    """
    for peer in tl.static_range(NUM_RANKS):
        if peer != RANK:
            last = (slot + _NUM_SLOTS - 1) % _NUM_SLOTS
            words = _slot_pointer(
                addresses, last, chunk_offset, RANK, peer, NUM_RANKS, SLOTS_OFFSET, SOURCE_STRIDE, tl.int32
            )
            for start in tl.static_range(0, CHUNK_BYTES // 4, 512):
                tl.store(words + start + tl.arange(0, 512), tl.full((512,), -1, tl.int32))
    tl.store(counts + tl.program_id(0), (slot + 1) % _NUM_SLOTS)


@triton.jit
def _all_reduce_kernel(
    x: tl.tensor,
    addresses: tl.tensor,
    counts: tl.tensor,
    num_vectors: tl.tensor,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    SLOTS_OFFSET: tl.constexpr,
    SOURCE_STRIDE: tl.constexpr,
    CHUNK_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """BLOCK, VECTOR: elements of a chunk and of 16 bytes. SLOTS_OFFSET, SOURCE_STRIDE: bytes."""
    wait_for_previous(OVERLAP)
    program = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    columns = program * BLOCK + offset
    inside = columns < num_vectors * VECTOR
    slot = tl.load(counts + program)
    chunk_offset = program.to(tl.int64) * CHUNK_BYTES
    value = tl.load(x + columns, mask=inside, other=0.0)
    _send(addresses, slot, chunk_offset, offset, value, inside, RANK, NUM_RANKS, SLOTS_OFFSET, SOURCE_STRIDE)
    total = _receive_sum(
        addresses, slot, chunk_offset, offset, value, inside, RANK, NUM_RANKS, SLOTS_OFFSET, SOURCE_STRIDE
    )
    tl.store(x + columns, total, mask=inside)
    _reset_previous_slot(
        addresses, counts, slot, chunk_offset, RANK, NUM_RANKS, SLOTS_OFFSET, SOURCE_STRIDE, CHUNK_BYTES
    )


@triton.jit
def _all_reduce_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    addresses: tl.tensor,
    counts: tl.tensor,
    prefetch: tl.tensor,
    num_rows: tl.tensor,
    rows_per_program: tl.tensor,
    prefetch_bytes: tl.tensor,
    prefetch_chunk: tl.tensor,
    eps: tl.tensor,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    SLOTS_OFFSET: tl.constexpr,
    SOURCE_STRIDE: tl.constexpr,
    CHUNK_BYTES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    NUM_THREADS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """A program has `rows_per_program` whole rows of SIZE elements. Byte offsets as in `_all_reduce_kernel`."""
    if OVERLAP:
        prefetch_share(prefetch, prefetch_bytes, prefetch_chunk, tl.program_id(0), NUM_THREADS)
    wait_for_previous(OVERLAP)
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    dtype: tl.constexpr = x.dtype.element_ty
    slot = tl.load(counts + program)
    chunk_offset = program.to(tl.int64) * CHUNK_BYTES
    first = program.to(tl.int64) * rows_per_program
    num_own_rows = tl.minimum(rows_per_program, num_rows - program * rows_per_program)
    # The first row stays in registers. In a decode step a program has no other row.
    value = tl.load(x + first * SIZE + columns, mask=inside, other=0.0)
    for row in range(num_own_rows):
        if row > 0:
            value = tl.load(x + (first + row) * SIZE + columns, mask=inside, other=0.0)
        offset = row * SIZE + columns
        _send(addresses, slot, chunk_offset, offset, value, inside, RANK, NUM_RANKS, SLOTS_OFFSET, SOURCE_STRIDE)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(residual + first * SIZE + columns, mask=inside, other=0.0)
    for row in range(num_own_rows):
        at = (first + row) * SIZE + columns
        if rows_per_program > 1:
            value = tl.load(x + at, mask=inside, other=0.0)
            before = tl.load(residual + at, mask=inside, other=0.0)
        offset = row * SIZE + columns
        summed = _receive_sum(
            addresses, slot, chunk_offset, offset, value, inside, RANK, NUM_RANKS, SLOTS_OFFSET, SOURCE_STRIDE
        )
        rounded = (summed.to(tl.float32) + before.to(tl.float32)).to(dtype)
        tl.store(total + at, rounded, mask=inside)
        tl.store(out + at, norm_of(rounded.to(tl.float32), factor, SIZE, eps, UNIT_OFFSET, dtype), mask=inside)
    _reset_previous_slot(
        addresses, counts, slot, chunk_offset, RANK, NUM_RANKS, SLOTS_OFFSET, SOURCE_STRIDE, CHUNK_BYTES
    )


_launch_all_reduce = Launcher(triton.jit(_all_reduce_kernel.fn, do_not_specialize=["num_vectors"]), overlaps=True)
_launch_all_reduce_norm = Launcher(
    triton.jit(
        _all_reduce_norm_kernel.fn,
        do_not_specialize=["num_rows", "rows_per_program", "prefetch_bytes", "prefetch_chunk"],
    ),
    overlaps=True,
)


def all_reduce_(x: torch.Tensor, buffers: SymmetricBuffers) -> None:
    """Sum x over the ranks, in place: contiguous, bf16 or fp32, a multiple of 16 bytes, at most SUM_MAX_BYTES.

    All ranks call it in the same order with the same sizes, one call after another on the device. Sums are taken in
    fp32 in the order of the ranks, so all ranks get the same bits.
    """
    size, num_bytes = x.element_size(), x.numel() * x.element_size()
    size_class = next(index for index, chunk in enumerate(SUM_CHUNK_BYTES) if num_bytes <= NUM_PROGRAMS * chunk)
    chunk = SUM_CHUNK_BYTES[size_class]
    constants = (*_constants(buffers, size_class), chunk // size, VECTOR_BYTES // size)
    tensors = (x, buffers.addresses, buffers.counts[size_class])
    grid = (-(-num_bytes // chunk), 1, 1)
    num_warps = min(chunk // VECTOR_BYTES // 32, 16)
    _launch_all_reduce(grid, tensors, (num_bytes // VECTOR_BYTES,), constants, num_warps=num_warps)


def all_reduce_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    unit_offset: bool,
    prefetch: torch.Tensor | None,
    buffers: SymmetricBuffers,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`all_reduce_` and then `norm.fused_add_rms_norm`, bit-equal to both, in one kernel that leaves x unchanged.

    x, residual [T, N], contiguous, T at least 1, a row a multiple of 16 bytes, all at most SUM_MAX_BYTES. Returns None,
    on all ranks alike and before any work, where a program's chunk cannot hold whole rows.
    """
    num_rows, size = x.shape
    rows_per_program = -(-num_rows // NUM_PROGRAMS)
    row_bytes = size * x.element_size()
    chunk_bytes = rows_per_program * row_bytes
    size_class = next((index for index, chunk in enumerate(SUM_CHUNK_BYTES) if chunk_bytes <= chunk), None)
    if size_class is None:
        return None
    out, total = torch.empty_like(x), torch.empty_like(x)
    block = power_of_two(size)
    num_warps = num_warps_for(block)
    num_programs = -(-num_rows // rows_per_program)
    constants = (*_constants(buffers, size_class), size, block, unit_offset, num_warps * 32)
    counts = buffers.counts[size_class]
    tensors = (x, residual, weight, out, total, buffers.addresses, counts, weight if prefetch is None else prefetch)
    scalars = (num_rows, rows_per_program, *prefetch_shares(prefetch, num_rows, num_programs), eps)
    _launch_all_reduce_norm((num_programs, 1, 1), tensors, scalars, constants, num_warps=num_warps)
    return out, total


def _constants(buffers: SymmetricBuffers, size_class: int) -> tuple[int, ...]:
    """RANK, NUM_RANKS, SLOTS_OFFSET, SOURCE_STRIDE and CHUNK_BYTES of the kernels."""
    chunk = SUM_CHUNK_BYTES[size_class]
    offset = sum_slots_offset(buffers.num_ranks, size_class)
    return buffers.rank, buffers.num_ranks, offset, NUM_PROGRAMS * chunk, chunk
