"""What carries an all-reduce: the seam between the op and the libraries below it.

Owns the protocol, the transport over torch.distributed, and the rule that picks a way by payload. The rule is a value:
it reads nothing that may differ between ranks. Who takes which transport is agreed by the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import distributed

ALIGNMENT = 16  # bytes: what a thread of the symmetric-memory kernels moves at once
SYMMETRIC_DTYPES = frozenset({torch.bfloat16, torch.float32})  # that they can add


class Transport(Protocol):
    """Sums tensors over the ranks of one group."""

    def all_reduce_(self, x: torch.Tensor) -> str:
        """Sum x (contiguous) in place; returns the name of the way it took, for the counts."""
        ...


class GroupTransport:
    """torch.distributed's own all-reduce: whatever the group's backend is, any dtype and size."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group
        self.name: str = distributed.get_backend(group)

    def all_reduce_(self, x: torch.Tensor) -> str:
        """See `Transport.all_reduce_`."""
        distributed.all_reduce(x, group=self._group)
        return self.name


class Way(StrEnum):
    """How a payload is summed."""

    ONE_SHOT = "one_shot"  # every rank reads all of every other's
    TWO_SHOT = "two_shot"  # every rank sums one part and reads the other sums
    GROUP = "group"  # by the group's own backend


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceRule:
    """The way of each payload, in bytes of one rank's input.

    Attributes:
        one_shot_max_bytes: up to here one-shot, whose latency is the least.
        two_shot_max_bytes: up to here two-shot, which moves less; not less than the first. Beyond it the group's own.
    """

    one_shot_max_bytes: int
    two_shot_max_bytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.one_shot_max_bytes <= self.two_shot_max_bytes:
            raise ValueError(
                f"one_shot_max_bytes is {self.one_shot_max_bytes}, two_shot_max_bytes {self.two_shot_max_bytes}; "
                "they must rise from 0"
            )

    @classmethod
    def measured(cls, num_ranks: int) -> AllReduceRule:
        """The rule for a group of `num_ranks`.

        The limits are those of two ranks, from benchmarks/results/collectives-tp2-h200.json. Of more ranks one-shot
        reads more, in proportion to the others, so its limit falls by as much; two-shot reads the same.
        """
        if num_ranks < 2:
            raise ValueError(f"a group of {num_ranks} has nothing to sum; the rule begins at 2 ranks")
        one_shot = _ONE_SHOT_OF_TWO // (num_ranks - 1) // ALIGNMENT * ALIGNMENT
        return cls(one_shot_max_bytes=one_shot, two_shot_max_bytes=_TWO_SHOT_OF_TWO)

    def way(self, num_bytes: int, dtype: torch.dtype, offset: int = 0) -> Way:
        """The way of a payload of `num_bytes`, `offset` bytes into its storage.

        Nothing to sum, a dtype that the kernels cannot add, and a payload off their alignment go to the group.
        """
        if dtype not in SYMMETRIC_DTYPES or not num_bytes or (num_bytes | offset) % ALIGNMENT:
            return Way.GROUP
        if num_bytes <= self.one_shot_max_bytes:
            return Way.ONE_SHOT
        return Way.TWO_SHOT if num_bytes <= self.two_shot_max_bytes else Way.GROUP


_ONE_SHOT_OF_TWO = 1 << 20
_TWO_SHOT_OF_TWO = 32 << 20
