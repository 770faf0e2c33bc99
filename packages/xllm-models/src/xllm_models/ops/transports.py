"""What carries all-reduces and all-gathers: the seam between the ops and the libraries below them.

Owns the protocol, the transport over torch.distributed, and the rule that picks a way by payload. The rule is a value:
it reads nothing that may differ between ranks. Who takes which transport is agreed by the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import distributed

ALIGNMENT = 16  # bytes: what a thread of the symmetric-memory kernels moves at once
SYMMETRIC_DTYPES = frozenset({torch.bfloat16, torch.float32})  # that they can add


# torch 2.13 renamed it and deprecated the old name.
_gather_into: Callable[..., object] = getattr(
    distributed, "all_gather_single" if hasattr(distributed, "all_gather_single") else "all_gather_into_tensor"
)


class Transport(Protocol):
    """Sums and gathers tensors over the ranks of one group. Returns the name of the way taken, for the counts."""

    def all_reduce_(self, x: torch.Tensor) -> str:
        """Sum x (contiguous) in place."""
        ...

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor, dim: int) -> str:
        """Write the ranks' x one after another along dimension `dim` (0 or 1) to out; both contiguous."""
        ...

    def all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        unit_offset: bool,
        prefetch: torch.Tensor | None = None,
    ) -> tuple[str, torch.Tensor, torch.Tensor] | None:
        """The sum of x over the ranks taken into the residual and normed: (way, norm, next residual), see the op.

        None, the same on all ranks, where this has no kernel for it; x is as it was then.
        """
        ...


class GroupTransport:
    """torch.distributed's own collectives: whatever the group's backend is, any dtype and size."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group
        self.name: str = distributed.get_backend(group)

    def all_reduce_(self, x: torch.Tensor) -> str:
        """See `Transport.all_reduce_`."""
        distributed.all_reduce(x, group=self._group)
        return self.name

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor, dim: int) -> str:
        """See `Transport.all_gather_into`."""
        if dim == 0 or x.shape[0] == 1:  # or they lie in order
            _gather_into(out.view(-1, *x.shape[1:]), x, group=self._group)
            return self.name
        shards = x.new_empty((self._group.size(), *x.shape))
        _gather_into(shards.view(-1, *x.shape[1:]), x, group=self._group)
        torch.cat(shards.unbind(), dim=dim, out=out)
        return self.name

    def all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        unit_offset: bool,
        prefetch: torch.Tensor | None = None,
    ) -> tuple[str, torch.Tensor, torch.Tensor] | None:
        """See `Transport.all_reduce_add_rms_norm`: None."""
        return None


class Way(StrEnum):
    """How a payload travels."""

    ONE_SHOT = "one_shot"  # every rank reads all of every other's
    TWO_SHOT = "two_shot"  # every rank sums one part and reads the sums of the other parts
    GROUP = "group"  # by the group's own backend


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportRule:
    """The way of each payload, in bytes of one rank's input.

    Attributes:
        one_shot_max_bytes: all-reduces up to here are one-shot, whose latency is the least.
        two_shot_max_bytes: up to here two-shot, which moves less; not less than the first. Beyond it the group's own.
        gather_max_bytes: all-gathers up to here are one-shot. Beyond it the group's own.
    """

    one_shot_max_bytes: int
    two_shot_max_bytes: int
    gather_max_bytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.one_shot_max_bytes <= self.two_shot_max_bytes:
            raise ValueError(
                f"one_shot_max_bytes is {self.one_shot_max_bytes}, two_shot_max_bytes {self.two_shot_max_bytes}; "
                "they must rise from 0"
            )
        if self.gather_max_bytes < 0:
            raise ValueError(f"gather_max_bytes is {self.gather_max_bytes}; it must be at least 0")

    @classmethod
    def measured(cls, num_ranks: int) -> TransportRule:
        """The rule for a group of `num_ranks`.

        The limits are those of two ranks, from benchmarks/results/collectives-tp2-h200.json. Of more ranks one-shot
        reads more, in proportion to the others, so its limit falls by as much; the others read the same. A number of
        ranks that torch's two-shot op does not take has no payload that is two-shot.
        """
        if num_ranks < 2:
            raise ValueError(f"a group of {num_ranks} has nothing to sum; the rule begins at 2 ranks")
        one_shot = _ONE_SHOT_OF_TWO // (num_ranks - 1) // ALIGNMENT * ALIGNMENT
        two_shot = _TWO_SHOT_OF_TWO if num_ranks in _TWO_SHOT_RANKS else one_shot
        return cls(one_shot_max_bytes=one_shot, two_shot_max_bytes=two_shot, gather_max_bytes=_GATHER_OF_TWO)

    def reduce_way(self, num_bytes: int, dtype: torch.dtype, offset: int = 0) -> Way:
        """The way of an all-reduce of `num_bytes`, `offset` bytes into their storage.

        Nothing to sum, a dtype that the kernels cannot add, and a payload off their alignment go to the group.
        """
        if dtype not in SYMMETRIC_DTYPES or not num_bytes or (num_bytes | offset) % ALIGNMENT:
            return Way.GROUP
        if num_bytes <= self.one_shot_max_bytes:
            return Way.ONE_SHOT
        return Way.TWO_SHOT if num_bytes <= self.two_shot_max_bytes else Way.GROUP

    def gather_way(self, num_bytes: int, row_bytes: int, offset: int = 0) -> Way:
        """The way of an all-gather of rows that stay whole; alignment of all as for `reduce_way`, any dtype."""
        if not num_bytes or (num_bytes | row_bytes | offset) % ALIGNMENT:
            return Way.GROUP
        return Way.ONE_SHOT if num_bytes <= self.gather_max_bytes else Way.GROUP


_ONE_SHOT_OF_TWO = 4 << 20
_TWO_SHOT_OF_TWO = 16 << 20
_TWO_SHOT_RANKS = (2, 4, 8)  # torch.ops.symm_mem.two_shot_all_reduce_out: "Not implemented for world_size=3"
_GATHER_OF_TWO = 18 << 20  # what the kernel takes: 118 rows of half of 152,000 bf16 logits
