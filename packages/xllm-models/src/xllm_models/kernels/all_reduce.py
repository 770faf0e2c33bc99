# mypy: disallow-untyped-decorators=False
"""One-shot all-reduce over memory that the ranks' devices read of each other, in Triton.

Every program has a block of the payload, and with the same program of the other ranks a channel of its own: two
places for its block, one flag for each rank, and a count of its calls that stays on the device. A call writes its block
into one place, tells the others the count, waits until they told theirs, and adds their blocks. The next call takes the
other place, and no rank comes to the one after it before all have left this one. So ranks meet once a call, and a
captured call may be replayed in any order with others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .launcher import Launcher

NUM_PROGRAMS = 128  # fewer than the multiprocessors of a device that this serves: all wait at the same time
BLOCK_BYTES = (2048, 8192)  # of a program; each size has channels of its own
MAX_BYTES = NUM_PROGRAMS * BLOCK_BYTES[-1]
_UNIT = 16  # bytes that a thread moves at once


@triton.jit
def _one_shot_kernel(
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
) -> None:
    """PLACES, FLAGS: offsets in bytes. STRIDE, BLOCK, UNIT: elements between the places, of a block, of a unit."""
    program = tl.program_id(0)
    columns = program * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_units * UNIT
    kind = x.dtype.element_ty
    count = tl.load(counts + program) + 1
    place = (count & 1) * STRIDE + columns
    value = tl.load(x + columns, mask=inside, other=0.0)
    own = (tl.load(addresses + RANK) + PLACES).to(tl.pointer_type(kind))
    tl.store(tl.multiple_of(own, 16) + place, value, mask=inside)
    tl.debug_barrier()
    for peer in tl.static_range(NUM_RANKS):
        if peer != RANK:
            theirs = (tl.load(addresses + peer) + FLAGS).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(theirs + program * NUM_RANKS + RANK, count, sem="release", scope="sys")
    mine = (tl.load(addresses + RANK) + FLAGS).to(tl.pointer_type(tl.int32)) + program * NUM_RANKS
    for peer in tl.static_range(NUM_RANKS):
        if peer != RANK:
            # The count may wrap around; how far it is ahead does not.
            while tl.atomic_add(mine + peer, 0, sem="acquire", scope="sys") - count < 0:
                pass
    tl.debug_barrier()
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for peer in tl.static_range(NUM_RANKS):  # in the same order on every rank
        if peer == RANK:
            total += value.to(tl.float32)
        else:
            other = (tl.load(addresses + peer) + PLACES).to(tl.pointer_type(kind))
            total += tl.load(tl.multiple_of(other, 16) + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + columns, total.to(kind), mask=inside)
    tl.store(counts + program, count)


_launch = Launcher(triton.jit(_one_shot_kernel.fn, do_not_specialize=["num_units"]))


def shared_bytes(num_ranks: int) -> int:
    """How much memory of each rank the channels take."""
    return _begin(num_ranks, len(BLOCK_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """One rank's ends of the channels.

    Attributes:
        rank: this one.
        addresses: [num_ranks] int64, on the device: where the `shared_bytes` of each rank begin, zero at the start and
            aligned to 16 bytes.
        counts: [len(BLOCK_BYTES), NUM_PROGRAMS] int32, on the device, zero at the start.
    """

    rank: int
    addresses: torch.Tensor
    counts: torch.Tensor


def one_shot(x: torch.Tensor, channels: Channels) -> None:
    """Sum x over the ranks, in place: contiguous, a multiple of 16 bytes, at most MAX_BYTES.

    All ranks call it in the same order with the same sizes, one call after another on the device. Sums are taken in
    fp32 in the order of the ranks, so all ranks get the same bits.
    """
    size, num_bytes = x.element_size(), x.numel() * x.element_size()
    kind = 0 if num_bytes <= NUM_PROGRAMS * BLOCK_BYTES[0] else 1
    num_ranks, block = channels.addresses.shape[0], BLOCK_BYTES[kind]
    places, stride = _begin(num_ranks, kind), NUM_PROGRAMS * block
    constants = (
        channels.rank, num_ranks, places, places + 2 * stride, stride // size, block // size, _UNIT // size,
    )  # fmt: skip
    tensors = (x, channels.addresses, channels.counts[kind])
    grid = (-(-num_bytes // block), 1, 1)
    _launch(grid, tensors, (num_bytes // _UNIT,), constants, num_warps=block // _UNIT // 32)


def _begin(num_ranks: int, kind: int) -> int:
    """Where the channels of a block size begin: behind those of the smaller ones, their places and flags."""
    return sum(NUM_PROGRAMS * (2 * block + 4 * num_ranks) for block in BLOCK_BYTES[:kind])
