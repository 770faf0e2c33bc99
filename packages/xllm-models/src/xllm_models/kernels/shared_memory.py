# mypy: disallow-untyped-decorators=False
"""One-shot all-reduce, alone and with the norm behind it, and all-gather, in Triton.

They go through memory that the ranks' devices read of each other.
Every program has a span of the payload, and with the same program of the other ranks a channel of its own: two places
for its span, one flag for each rank, and a count of its calls that stays on the device. A call writes its span into one
place, tells the others the count, waits until they told theirs, and reads their spans. The next call takes the other
place, and no rank comes to the one after it before all have left this one. So ranks meet once a call, and a captured
call may be replayed in any order with others. All programs of a call are on the device before the next kernel comes
(`overlap`), so none that waits for another rank can be kept out by one that waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .launcher import Launcher, num_warps_for, power_of_two
from .norm import norm_of
from .overlap import wait_for_previous

NUM_PROGRAMS = 128  # fewer than the multiprocessors of a device that this serves: all wait at the same time
_UNIT = 16  # bytes that a thread moves at once

# Bytes of a program's span, by kind of channel. The smallest that holds a payload spreads it the widest.
REDUCE_SPANS = (2048, 8192, 32768)
_GATHER_BLOCK = 16384  # of a span, what is moved at once
GATHER_SPAN = 9 * _GATHER_BLOCK
_SPANS = (*REDUCE_SPANS, GATHER_SPAN)
REDUCE_MAX_BYTES = NUM_PROGRAMS * REDUCE_SPANS[-1]
GATHER_MAX_BYTES = NUM_PROGRAMS * GATHER_SPAN


@triton.jit
def _meet(
    addresses: tl.tensor, count: tl.tensor, RANK: tl.constexpr, NUM_RANKS: tl.constexpr, FLAGS: tl.constexpr
) -> None:
    """All threads' writes before it are seen by all ranks' threads behind it."""
    channel = tl.program_id(0) * NUM_RANKS
    tl.debug_barrier()
    for peer in tl.static_range(NUM_RANKS):
        if peer != RANK:
            theirs = (tl.load(addresses + peer) + FLAGS).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(theirs + channel + RANK, count, sem="release", scope="sys")
    mine = (tl.load(addresses + RANK) + FLAGS).to(tl.pointer_type(tl.int32)) + channel
    for peer in tl.static_range(NUM_RANKS):
        if peer != RANK:
            # The count may wrap around; how far it is ahead does not.
            while tl.atomic_add(mine + peer, 0, sem="acquire", scope="sys") - count < 0:
                pass
    tl.debug_barrier()


@triton.jit
def _reduce_kernel(
    x: tl.tensor,
    addresses: tl.tensor,
    counts: tl.tensor,
    num_units: tl.tensor,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    PLACES: tl.constexpr,
    FLAGS: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """PLACES, FLAGS: offsets in bytes; STRIDE: bytes between the two places. BLOCK, UNIT: elements of each."""
    wait_for_previous(OVERLAP)
    program = tl.program_id(0)
    columns = program * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_units * UNIT
    kind = x.dtype.element_ty
    count = tl.load(counts + program) + 1
    place = PLACES + (count & 1).to(tl.int64) * STRIDE
    value = tl.load(x + columns, mask=inside, other=0.0)
    own = tl.multiple_of((tl.load(addresses + RANK) + place).to(tl.pointer_type(kind)), 16)
    tl.store(own + columns, value, mask=inside)
    _meet(addresses, count, RANK, NUM_RANKS, FLAGS)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for peer in tl.static_range(NUM_RANKS):  # in the same order on every rank
        if peer == RANK:
            total += value.to(tl.float32)
        else:
            other = tl.multiple_of((tl.load(addresses + peer) + place).to(tl.pointer_type(kind)), 16)
            total += tl.load(other + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + columns, total.to(kind), mask=inside)
    tl.store(counts + program, count)


@triton.jit
def _reduce_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    addresses: tl.tensor,
    counts: tl.tensor,
    num_rows: tl.tensor,
    rows_each: tl.tensor,
    eps: tl.tensor,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    PLACES: tl.constexpr,
    FLAGS: tl.constexpr,
    STRIDE: tl.constexpr,
    SPAN: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """A program has `rows_each` whole rows of SIZE elements. PLACES, FLAGS: offsets in bytes; STRIDE, SPAN: bytes."""
    wait_for_previous(OVERLAP)
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    kind = x.dtype.element_ty
    count = tl.load(counts + program) + 1
    place = PLACES + (count & 1).to(tl.int64) * STRIDE + program.to(tl.int64) * SPAN
    own = tl.multiple_of((tl.load(addresses + RANK) + place).to(tl.pointer_type(kind)), 16)
    first = program.to(tl.int64) * rows_each
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    # The first row stays in registers while the ranks meet; a decode step's programs have no other.
    value = tl.load(x + first * SIZE + columns, mask=inside, other=0.0)
    tl.store(own + columns, value, mask=inside)
    before = tl.load(residual + first * SIZE + columns, mask=inside, other=0.0)
    num_mine = tl.minimum(rows_each, num_rows - program * rows_each)
    for row in range(1, num_mine):
        further = tl.load(x + (first + row) * SIZE + columns, mask=inside, other=0.0)
        tl.store(own + row * SIZE + columns, further, mask=inside)
    _meet(addresses, count, RANK, NUM_RANKS, FLAGS)
    for row in range(num_mine):
        at = (first + row) * SIZE + columns
        if row > 0:
            value = tl.load(x + at, mask=inside, other=0.0)
            before = tl.load(residual + at, mask=inside, other=0.0)
        summed = tl.zeros((BLOCK,), dtype=tl.float32)
        for peer in tl.static_range(NUM_RANKS):  # in the same order on every rank
            if peer == RANK:
                summed += value.to(tl.float32)
            else:
                other = tl.multiple_of((tl.load(addresses + peer) + place).to(tl.pointer_type(kind)), 16)
                theirs = tl.load(other + row * SIZE + columns, mask=inside, other=0.0)
                summed += theirs.to(tl.float32)
        # Rounded before the residual comes to it, as without fusion.
        rounded = (summed.to(kind).to(tl.float32) + before.to(tl.float32)).to(kind)
        tl.store(total + at, rounded, mask=inside)
        tl.store(out + at, norm_of(rounded.to(tl.float32), factor, SIZE, eps, UNIT_OFFSET, kind), mask=inside)
    tl.store(counts + program, count)


@triton.jit
def _gather_kernel(
    x: tl.tensor,
    out: tl.tensor,
    addresses: tl.tensor,
    counts: tl.tensor,
    num_units: tl.tensor,
    row_units: tl.tensor,
    num_rounds: tl.tensor,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    PLACES: tl.constexpr,
    FLAGS: tl.constexpr,
    STRIDE: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """In units of 4 words of 32 bits, so many to a row, BLOCK at once. PLACES, FLAGS: offsets in bytes; STRIDE, SPAN:
    bytes."""
    wait_for_previous(OVERLAP)
    program = tl.program_id(0)
    count = tl.load(counts + program) + 1
    # A program's place is the same for all payloads, or it would meet another program's.
    place = PLACES + (count & 1).to(tl.int64) * STRIDE + program.to(tl.int64) * SPAN
    own = tl.multiple_of((tl.load(addresses + RANK) + place).to(tl.pointer_type(tl.int32)), 16)
    words = tl.arange(0, 4)[None, :]
    for part in range(num_rounds):
        within = part * BLOCK + tl.arange(0, BLOCK)[:, None]
        unit = program * num_rounds * BLOCK + within
        inside = unit < num_units
        value = tl.load(x + (unit * 4 + words), mask=inside, other=0)
        tl.store(own + (within * 4 + words), value, mask=inside)
    _meet(addresses, count, RANK, NUM_RANKS, FLAGS)
    for part in range(num_rounds):
        within = part * BLOCK + tl.arange(0, BLOCK)[:, None]
        unit = program * num_rounds * BLOCK + within
        inside = unit < num_units
        row = unit // row_units
        begin = row.to(tl.int64) * (NUM_RANKS * row_units) + (unit - row * row_units)  # of rank 0's part, in units
        for peer in tl.static_range(NUM_RANKS):
            if peer == RANK:
                value = tl.load(x + (unit * 4 + words), mask=inside, other=0)
            else:
                other = tl.multiple_of((tl.load(addresses + peer) + place).to(tl.pointer_type(tl.int32)), 16)
                value = tl.load(other + (within * 4 + words), mask=inside, other=0)
            tl.store(out + ((begin + peer * row_units) * 4 + words), value, mask=inside)
    tl.store(counts + program, count)


_launch_reduce = Launcher(triton.jit(_reduce_kernel.fn, do_not_specialize=["num_units"]), overlaps=True)
_launch_reduce_norm = Launcher(
    triton.jit(_reduce_norm_kernel.fn, do_not_specialize=["num_rows", "rows_each"]), overlaps=True
)
_launch_gather = Launcher(
    triton.jit(_gather_kernel.fn, do_not_specialize=["num_units", "row_units", "num_rounds"]),
    overlaps=True,
    num_warps=16,
)


def shared_bytes(num_ranks: int) -> int:
    """How much memory of each rank the channels take."""
    return _begin(num_ranks, len(_SPANS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """One rank's ends of the channels.

    Attributes:
        rank: this one.
        addresses: [num_ranks] int64, on the device: where the `shared_bytes` of each rank begin, zero at the start and
            aligned to 16 bytes.
        counts: [number of kinds, NUM_PROGRAMS] int32, on the device, zero at the start; see `new_counts`.
    """

    rank: int
    addresses: torch.Tensor
    counts: torch.Tensor


def new_counts(device: torch.device | str) -> torch.Tensor:
    """Counts for `Channels`."""
    return torch.zeros((len(_SPANS), NUM_PROGRAMS), dtype=torch.int32, device=device)


def all_reduce_(x: torch.Tensor, channels: Channels) -> None:
    """Sum x over the ranks, in place: contiguous, a multiple of 16 bytes, at most REDUCE_MAX_BYTES.

    All ranks call it in the same order with the same sizes, one call after another on the device. Sums are taken in
    fp32 in the order of the ranks, so all ranks get the same bits.
    """
    size, num_bytes = x.element_size(), x.numel() * x.element_size()
    kind = next(kind for kind, span in enumerate(REDUCE_SPANS) if num_bytes <= NUM_PROGRAMS * span)
    span = REDUCE_SPANS[kind]
    places, flags = _offsets(channels, kind)
    constants = (
        channels.rank, channels.addresses.shape[0], places, flags, NUM_PROGRAMS * span, span // size, _UNIT // size,
    )  # fmt: skip
    tensors = (x, channels.addresses, channels.counts[kind])
    grid = (-(-num_bytes // span), 1, 1)
    _launch_reduce(grid, tensors, (num_bytes // _UNIT,), constants, num_warps=min(span // _UNIT // 32, 16))


def all_reduce_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    unit_offset: bool,
    channels: Channels,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`all_reduce_` and then `norm.fused_add_rms_norm`, to the bit, in one call that leaves x as it is.

    x, residual [T, N], contiguous, T at least 1, a row a multiple of 16 bytes, all at most REDUCE_MAX_BYTES. None where
    the programs' spans cannot hold whole rows; nothing has been done then, on no rank.
    """
    num_rows, size = x.shape
    rows_each = -(-num_rows // NUM_PROGRAMS)
    row_bytes = size * x.element_size()
    kind = next((kind for kind, span in enumerate(REDUCE_SPANS) if rows_each * row_bytes <= span), None)
    if kind is None:
        return None
    out, total = torch.empty_like(x), torch.empty_like(x)
    places, flags = _offsets(channels, kind)
    block = power_of_two(size)
    constants = (
        channels.rank, channels.addresses.shape[0], places, flags, NUM_PROGRAMS * REDUCE_SPANS[kind],
        REDUCE_SPANS[kind], size, block, unit_offset,
    )  # fmt: skip
    tensors = (x, residual, weight, out, total, channels.addresses, channels.counts[kind])
    grid = (-(-num_rows // rows_each), 1, 1)
    _launch_reduce_norm(grid, tensors, (num_rows, rows_each, eps), constants, num_warps=num_warps_for(block))
    return out, total


def all_gather_into(out: torch.Tensor, x: torch.Tensor, dim: int, channels: Channels) -> None:
    """out = the ranks' x, one after another along dimension 0 or 1. Both contiguous, x at most GATHER_MAX_BYTES.

    x is a multiple of 16 bytes, and along dimension 1 so is each of its rows [N, M]. Called as `all_reduce_` is.
    """
    kind = len(_SPANS) - 1
    num_bytes = x.numel() * x.element_size()
    num_rounds = -(-num_bytes // (NUM_PROGRAMS * _GATHER_BLOCK))
    places, flags = _offsets(channels, kind)
    constants = (
        channels.rank, channels.addresses.shape[0], places, flags, NUM_PROGRAMS * GATHER_SPAN, GATHER_SPAN,
        _GATHER_BLOCK // _UNIT,
    )  # fmt: skip
    tensors = (x.view(torch.int32), out.view(torch.int32), channels.addresses, channels.counts[kind])
    grid = (-(-num_bytes // (num_rounds * _GATHER_BLOCK)), 1, 1)
    num_units = num_bytes // _UNIT
    row_units = num_units // x.shape[0] if dim == 1 else num_units
    _launch_gather(grid, tensors, (num_units, row_units, num_rounds), constants)


def _offsets(channels: Channels, kind: int) -> tuple[int, int]:
    """Where the places and the flags of a kind of channel begin, in bytes."""
    places = _begin(channels.addresses.shape[0], kind)
    return places, places + 2 * NUM_PROGRAMS * _SPANS[kind]


def _begin(num_ranks: int, kind: int) -> int:
    """Where the channels of a kind begin: behind the places and flags of those before it."""
    return sum(NUM_PROGRAMS * (2 * span + 4 * num_ranks) for span in _SPANS[:kind])
