# mypy: disallow-untyped-decorators=False
"""One-shot all-reduce, alone and with the norm behind it, in Triton: the ranks write into each other's memory
(`channels`).

No flag says that a payload has come; the payload does. A place is full of 0xFF bytes until then, which is a number that
nobody sends: a NaN, in whose stead another NaN goes. So a sum costs one way between the devices, where a flag behind
the payload costs three. A call takes the next of three places, and clears the one of the call before it: another rank
writes there again two calls on, which it comes to only when this rank has come one further, behind the clearing.

The idea is that of the Lamport all-reduce in TensorRT-LLM. All programs of a call are on the device before the next
kernel comes (`overlap`), so none that waits for another rank can be kept out by one that waits for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .channels import NUM_PROGRAMS, SUM_PLACES, SUM_SPANS, UNIT, Channels, sums_at
from .launcher import Launcher, num_warps_for, power_of_two
from .norm import norm_of
from .overlap import wait_for_previous
from .prefetch import prefetch_share, prefetch_shares

_NUM_PLACES = tl.constexpr(SUM_PLACES)


@triton.jit
def _bits(value: tl.tensor) -> tl.tensor:
    return value.to(tl.int16 if value.dtype.primitive_bitwidth == 16 else tl.int32, bitcast=True)


@triton.jit
def _place(
    addresses: tl.tensor,
    number: tl.tensor,
    span: tl.tensor,
    OF: tl.constexpr,
    SOURCE: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    PLACES: tl.constexpr,
    STRIDE: tl.constexpr,
    kind: tl.constexpr,
) -> tl.tensor:
    """In the memory of rank OF, where what rank SOURCE sends comes to; `span` bytes in. STRIDE: bytes of a source."""
    source = SOURCE - 1 if SOURCE > OF else SOURCE
    begin = PLACES + (number * (NUM_RANKS - 1) + source).to(tl.int64) * STRIDE + span
    return tl.multiple_of((tl.load(addresses + OF) + begin).to(tl.pointer_type(kind)), 16)


@triton.jit
def _send(
    addresses: tl.tensor,
    number: tl.tensor,
    span: tl.tensor,
    offset: tl.tensor,
    value: tl.tensor,
    inside: tl.tensor,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    PLACES: tl.constexpr,
    STRIDE: tl.constexpr,
) -> None:
    """Writes this rank's term to all others, `offset` elements into the span."""
    for peer in tl.static_range(NUM_RANKS):
        if peer != RANK:
            place = _place(addresses, number, span, peer, RANK, NUM_RANKS, PLACES, STRIDE, value.dtype)
            bits = _bits(value)
            bits = tl.where(bits == -1, bits - 1, bits)  # another NaN
            tl.store(place + offset, bits.to(value.dtype, bitcast=True), mask=inside)


@triton.jit
def _sum(
    addresses: tl.tensor,
    number: tl.tensor,
    span: tl.tensor,
    offset: tl.tensor,
    value: tl.tensor,
    inside: tl.tensor,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    PLACES: tl.constexpr,
    STRIDE: tl.constexpr,
) -> tl.tensor:
    """The sum of this rank's term and those that the others send, for which it waits; rounded to their dtype."""
    total = tl.zeros(value.shape, dtype=tl.float32)
    for peer in tl.static_range(NUM_RANKS):  # in the same order on every rank
        if peer == RANK:
            total += value.to(tl.float32)
        else:
            place = _place(addresses, number, span, RANK, peer, NUM_RANKS, PLACES, STRIDE, value.dtype) + offset
            term = tl.load(place, mask=inside, other=0.0, volatile=True)
            while tl.max((_bits(term) == -1).to(tl.int32), 0) > 0:
                term = tl.load(place, mask=inside, other=0.0, volatile=True)
            total += term.to(tl.float32)
    return total.to(value.dtype)


@triton.jit
def _end(
    addresses: tl.tensor,
    counts: tl.tensor,
    number: tl.tensor,
    span: tl.tensor,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    PLACES: tl.constexpr,
    STRIDE: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    """Clears what the call before this one received, whole spans of words: it may have used more than this one."""
    for peer in tl.static_range(NUM_RANKS):
        if peer != RANK:
            last = (number + _NUM_PLACES - 1) % _NUM_PLACES
            words = _place(addresses, last, span, RANK, peer, NUM_RANKS, PLACES, STRIDE, tl.int32)
            for start in tl.static_range(0, SPAN // 4, 512):
                tl.store(words + start + tl.arange(0, 512), tl.full((512,), -1, tl.int32))
    tl.store(counts + tl.program_id(0), (number + 1) % _NUM_PLACES)


@triton.jit
def _reduce_kernel(
    x: tl.tensor,
    addresses: tl.tensor,
    counts: tl.tensor,
    num_units: tl.tensor,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    PLACES: tl.constexpr,
    STRIDE: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """PLACES: offset in bytes. STRIDE: bytes from place to place; SPAN: bytes. BLOCK, UNIT: elements of span, unit."""
    wait_for_previous(OVERLAP)
    program = tl.program_id(0)
    within = tl.arange(0, BLOCK)
    columns = program * BLOCK + within
    inside = columns < num_units * UNIT
    number = tl.load(counts + program)
    span = program.to(tl.int64) * SPAN
    value = tl.load(x + columns, mask=inside, other=0.0)
    _send(addresses, number, span, within, value, inside, RANK, NUM_RANKS, PLACES, STRIDE)
    total = _sum(addresses, number, span, within, value, inside, RANK, NUM_RANKS, PLACES, STRIDE)
    tl.store(x + columns, total, mask=inside)
    _end(addresses, counts, number, span, RANK, NUM_RANKS, PLACES, STRIDE, SPAN)


@triton.jit
def _reduce_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    addresses: tl.tensor,
    counts: tl.tensor,
    prefetch: tl.tensor,
    num_rows: tl.tensor,
    rows_each: tl.tensor,
    prefetch_bytes: tl.tensor,
    prefetch_chunk: tl.tensor,
    eps: tl.tensor,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    PLACES: tl.constexpr,
    STRIDE: tl.constexpr,
    SPAN: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    NUM_THREADS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """A program has `rows_each` whole rows of SIZE elements. PLACES, STRIDE, SPAN as in `_reduce_kernel`."""
    if OVERLAP:
        prefetch_share(prefetch, prefetch_bytes, prefetch_chunk, tl.program_id(0), NUM_THREADS)
    wait_for_previous(OVERLAP)
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    kind: tl.constexpr = x.dtype.element_ty
    number = tl.load(counts + program)
    span = program.to(tl.int64) * SPAN
    first = program.to(tl.int64) * rows_each
    num_mine = tl.minimum(rows_each, num_rows - program * rows_each)
    # The first row stays in registers; a decode step's programs have no other.
    value = tl.load(x + first * SIZE + columns, mask=inside, other=0.0)
    for row in range(num_mine):
        if row > 0:
            value = tl.load(x + (first + row) * SIZE + columns, mask=inside, other=0.0)
        offset = row * SIZE + columns
        _send(addresses, number, span, offset, value, inside, RANK, NUM_RANKS, PLACES, STRIDE)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(residual + first * SIZE + columns, mask=inside, other=0.0)
    for row in range(num_mine):
        at = (first + row) * SIZE + columns
        if rows_each > 1:
            value = tl.load(x + at, mask=inside, other=0.0)
            before = tl.load(residual + at, mask=inside, other=0.0)
        offset = row * SIZE + columns
        summed = _sum(addresses, number, span, offset, value, inside, RANK, NUM_RANKS, PLACES, STRIDE)
        rounded = (summed.to(tl.float32) + before.to(tl.float32)).to(kind)
        tl.store(total + at, rounded, mask=inside)
        tl.store(out + at, norm_of(rounded.to(tl.float32), factor, SIZE, eps, UNIT_OFFSET, kind), mask=inside)
    _end(addresses, counts, number, span, RANK, NUM_RANKS, PLACES, STRIDE, SPAN)


_launch_reduce = Launcher(triton.jit(_reduce_kernel.fn, do_not_specialize=["num_units"]), overlaps=True)
_launch_reduce_norm = Launcher(
    triton.jit(_reduce_norm_kernel.fn, do_not_specialize=["num_rows", "rows_each", "prefetch_bytes", "prefetch_chunk"]),
    overlaps=True,
)


def all_reduce_(x: torch.Tensor, channels: Channels) -> None:
    """Sum x over the ranks, in place: contiguous, bf16 or fp32, a multiple of 16 bytes, at most SUM_MAX_BYTES.

    All ranks call it in the same order with the same sizes, one call after another on the device. Sums are taken in
    fp32 in the order of the ranks, so all ranks get the same bits.
    """
    size, num_bytes = x.element_size(), x.numel() * x.element_size()
    kind = next(kind for kind, span in enumerate(SUM_SPANS) if num_bytes <= NUM_PROGRAMS * span)
    span = SUM_SPANS[kind]
    constants = (*_constants(channels, kind), span // size, UNIT // size)
    tensors = (x, channels.addresses, channels.counts[kind])
    grid = (-(-num_bytes // span), 1, 1)
    _launch_reduce(grid, tensors, (num_bytes // UNIT,), constants, num_warps=min(span // UNIT // 32, 16))


def all_reduce_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    unit_offset: bool,
    prefetch: torch.Tensor | None,
    channels: Channels,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`all_reduce_` and then `norm.fused_add_rms_norm`, to the bit, in one call that leaves x as it is.

    x, residual [T, N], contiguous, T at least 1, a row a multiple of 16 bytes, all at most SUM_MAX_BYTES. None where
    the programs' spans cannot hold whole rows; nothing has been done then, on no rank.
    """
    num_rows, size = x.shape
    rows_each = -(-num_rows // NUM_PROGRAMS)
    row_bytes = size * x.element_size()
    kind = next((kind for kind, span in enumerate(SUM_SPANS) if rows_each * row_bytes <= span), None)
    if kind is None:
        return None
    out, total = torch.empty_like(x), torch.empty_like(x)
    block = power_of_two(size)
    num_warps = num_warps_for(block)
    num_programs = -(-num_rows // rows_each)
    constants = (*_constants(channels, kind), size, block, unit_offset, num_warps * 32)
    counts = channels.counts[kind]
    tensors = (x, residual, weight, out, total, channels.addresses, counts, weight if prefetch is None else prefetch)
    scalars = (num_rows, rows_each, *prefetch_shares(prefetch, num_rows, num_programs), eps)
    _launch_reduce_norm((num_programs, 1, 1), tensors, scalars, constants, num_warps=num_warps)
    return out, total


def _constants(channels: Channels, kind: int) -> tuple[int, ...]:
    """Rank, ranks, where the places begin, bytes between two of them, bytes of a span."""
    span = SUM_SPANS[kind]
    return channels.rank, channels.num_ranks, sums_at(channels.num_ranks, kind), NUM_PROGRAMS * span, span
