# mypy: disallow-untyped-decorators=False
"""One-shot all-gather through memory that the ranks' devices read of each other (`channels`), in Triton.

A call writes a program's span into one of two places, tells the others the count of its calls, waits until they told
theirs, and reads their spans. The next call takes the other place, and no rank comes to the one after it before all
have left this one: ranks meet once a call. All programs of a call are on the device before the next kernel comes
(`overlap`), so none that waits for another rank can be kept out by one that waits for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .channels import (
    GATHER_BLOCK,
    GATHER_SPAN,
    NUM_PROGRAMS,
    UNIT,
    Channels,
    gather_flags_at,
)
from .launcher import Launcher
from .overlap import wait_for_previous


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
    FLAGS: tl.constexpr,
    STRIDE: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """In units of 4 words of 32 bits, so many to a row, BLOCK at once. FLAGS: offset in bytes; STRIDE, SPAN: bytes."""
    wait_for_previous(OVERLAP)
    program = tl.program_id(0)
    count = tl.load(counts + program) + 1
    # A program's place is the same for all payloads, or it would meet another program's.
    place = (count & 1).to(tl.int64) * STRIDE + program.to(tl.int64) * SPAN
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


_launch = Launcher(
    triton.jit(_gather_kernel.fn, do_not_specialize=["num_units", "row_units", "num_rounds"]),
    overlaps=True,
    num_warps=16,
)


def all_gather_into(out: torch.Tensor, x: torch.Tensor, dim: int, channels: Channels) -> None:
    """out = the ranks' x, one after another along dimension 0 or 1. Both contiguous, x at most GATHER_MAX_BYTES.

    x is a multiple of 16 bytes, and along dimension 1 so is each of its rows [N, M]. All ranks call it in the same
    order with the same sizes, one call after another on the device.
    """
    num_bytes = x.numel() * x.element_size()
    num_rounds = -(-num_bytes // (NUM_PROGRAMS * GATHER_BLOCK))
    constants = (
        channels.rank, channels.num_ranks, gather_flags_at(), NUM_PROGRAMS * GATHER_SPAN, GATHER_SPAN,
        GATHER_BLOCK // UNIT,
    )  # fmt: skip
    words = (x.view(-1).view(torch.int32), out.view(-1).view(torch.int32))  # rows may be no whole words
    tensors = (*words, channels.addresses, channels.counts[-1])
    grid = (-(-num_bytes // (num_rounds * GATHER_BLOCK)), 1, 1)
    num_units = num_bytes // UNIT
    row_units = num_units // x.shape[0] if dim == 1 else num_units
    _launch(grid, tensors, (num_units, row_units, num_rounds), constants)
