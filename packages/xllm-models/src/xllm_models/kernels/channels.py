"""Memory that the ranks' devices read and write of each other, and how the kernels of `shared_sums` and `shared_gather`
share it.

Owns the places of the channels and the sizes that fit them. Every program of a kernel has a span of the payload and,
with the same program of the other ranks, a channel of its own, so programs wait for their like and for nothing else. A
channel keeps the count of its calls on the device: a captured call may be replayed in any order with others, as long as
all ranks do the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NUM_PROGRAMS = 128  # fewer than the multiprocessors of a device that this serves: all wait at the same time
UNIT = 16  # bytes that a thread moves at once

# Bytes of a program's span in a sum, by kind of channel. The smallest that holds a payload spreads it the widest.
SUM_SPANS = (2048, 8192, 32768)
SUM_PLACES = 3
GATHER_BLOCK = 16384  # of a span, what is moved at once
GATHER_SPAN = 9 * GATHER_BLOCK
GATHER_PLACES = 2
SUM_MAX_BYTES = NUM_PROGRAMS * SUM_SPANS[-1]
GATHER_MAX_BYTES = NUM_PROGRAMS * GATHER_SPAN

NOTHING = 0xFF  # every byte of a sum's place that nothing has come to; see `shared_sums`


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """One rank's ends of the channels.

    Attributes:
        rank: this one.
        addresses: [num_ranks] int64, on the device: where the `shared_bytes` of each rank begin, each `prepare`d
            and aligned to 16 bytes.
        counts: [kinds of sums, and the gathers, NUM_PROGRAMS] int32, on the device; see `new_counts`.
    """

    rank: int
    addresses: torch.Tensor
    counts: torch.Tensor

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        return self.addresses.shape[0]


def new_counts(device: torch.device | str) -> torch.Tensor:
    """Counts for `Channels`."""
    return torch.zeros((len(SUM_SPANS) + 1, NUM_PROGRAMS), dtype=torch.int32, device=device)


def shared_bytes(num_ranks: int) -> int:
    """How much memory of each rank the channels take."""
    return sums_at(num_ranks, len(SUM_SPANS))


def prepare(memory: torch.Tensor, num_ranks: int) -> None:
    """Makes a rank's `shared_bytes` [uint8] ready for the first call. No rank may call before all have done this."""
    memory[: gather_flags_at() + _flag_bytes(num_ranks)].zero_()
    memory[sums_at(num_ranks, 0) :].fill_(NOTHING)


def gather_flags_at() -> int:
    """Where the flags of the gathers begin, in bytes: behind their places, which come first."""
    return GATHER_PLACES * NUM_PROGRAMS * GATHER_SPAN


def sums_at(num_ranks: int, kind: int) -> int:
    """Where the places of a kind of sums begin: for each place one for each other rank, and a span a program."""
    begin = -(-(gather_flags_at() + _flag_bytes(num_ranks)) // 128) * 128
    return begin + sum(SUM_PLACES * (num_ranks - 1) * NUM_PROGRAMS * span for span in SUM_SPANS[:kind])


def _flag_bytes(num_ranks: int) -> int:
    return 4 * NUM_PROGRAMS * num_ranks
