"""Layout of the symmetric-memory buffers that `lamport_all_reduce` and `symmetric_all_gather` exchange data through.

Owns the sizes and offsets of the buffers and their first values. Each rank has one buffer, which all ranks map.

Program i of a kernel handles chunk i of the payload. It exchanges data only with program i of the other ranks, through
slots of its own, so it never waits for another program. Call counts stay on the device, so a captured call can be
replayed in any order with other calls, as long as all ranks do the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# All programs spin at the same time, so they must be resident together: fewer than an H200's 132 multiprocessors.
NUM_PROGRAMS = 128
VECTOR_BYTES = 16  # the widest load and store of a thread

# Chunk of one program in an all-reduce, by size class. A call takes the smallest class that holds its payload, which
# spreads the payload over the most programs.
SUM_CHUNK_BYTES = (2048, 8192, 32768)
SUM_SLOTS = 3  # triple buffer: this call's slot, the previous call's, which this call resets, and the next call's
GATHER_BLOCK = 16384  # bytes that a program moves per loop iteration
GATHER_CHUNK_BYTES = 9 * GATHER_BLOCK
GATHER_SLOTS = 2  # double buffer
# The one-shot limits of `ops.transports`, measured in benchmarks/results/collectives-tp2-h200.json, are within these.
SUM_MAX_BYTES = NUM_PROGRAMS * SUM_CHUNK_BYTES[-1]
GATHER_MAX_BYTES = NUM_PROGRAMS * GATHER_CHUNK_BYTES

SENTINEL = 0xFF  # value of every byte of an all-reduce slot until data arrives; see `lamport_all_reduce`


@dataclass(frozen=True, slots=True, kw_only=True)
class SymmetricBuffers:
    """One rank's view of all ranks' buffers.

    Attributes:
        rank: this rank.
        addresses: [num_ranks] int64, on the device: address of each rank's buffer of `buffer_bytes`, initialized by
            `initialize` and aligned to 16 bytes.
        counts: [size classes, then one row for all-gathers; NUM_PROGRAMS] int32, on the device: the next slot of an
            all-reduce, the number of calls of an all-gather. Made by `new_counts`.
    """

    rank: int
    addresses: torch.Tensor
    counts: torch.Tensor

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.addresses.shape[0]


def new_counts(device: torch.device | str) -> torch.Tensor:
    """Zeroed call counts for `SymmetricBuffers`."""
    return torch.zeros((len(SUM_CHUNK_BYTES) + 1, NUM_PROGRAMS), dtype=torch.int32, device=device)


def buffer_bytes(num_ranks: int) -> int:
    """Size of one rank's buffer."""
    return sum_slots_offset(num_ranks, len(SUM_CHUNK_BYTES))


def initialize(buffer: torch.Tensor, num_ranks: int) -> None:
    """Writes the first values of a rank's buffer [`buffer_bytes`] uint8. No rank may call before all have done this."""
    buffer[: gather_flags_offset() + _flag_bytes(num_ranks)].zero_()
    buffer[sum_slots_offset(num_ranks, 0) :].fill_(SENTINEL)


def gather_flags_offset() -> int:
    """Offset in bytes of the all-gather flags. They follow the all-gather slots, which start the buffer."""
    return GATHER_SLOTS * NUM_PROGRAMS * GATHER_CHUNK_BYTES


def sum_slots_offset(num_ranks: int, size_class: int) -> int:
    """Offset in bytes of the slots of one size class: [SUM_SLOTS, num_ranks - 1 sources, NUM_PROGRAMS] chunks."""
    begin = -(-(gather_flags_offset() + _flag_bytes(num_ranks)) // 128) * 128
    return begin + sum(SUM_SLOTS * (num_ranks - 1) * NUM_PROGRAMS * size for size in SUM_CHUNK_BYTES[:size_class])


def _flag_bytes(num_ranks: int) -> int:
    return 4 * NUM_PROGRAMS * num_ranks
