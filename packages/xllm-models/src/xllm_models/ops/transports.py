"""`Transport`, the interface that collective ops use to all-reduce and all-gather, and its torch.distributed version.

Also owns the rule that chooses the algorithm of a payload. The rule depends only on values that are equal on all ranks.
The host makes the ranks agree on one transport.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import distributed

ALIGNMENT = 16  # bytes of one access of a thread in the symmetric-memory kernels
SYMMETRIC_DTYPES = frozenset({torch.bfloat16, torch.float32})  # dtypes that the symmetric-memory kernels can sum

# torch 2.13 renamed it and deprecated the old name.
_gather_into: Callable[..., object] = getattr(
    distributed, "all_gather_single" if hasattr(distributed, "all_gather_single") else "all_gather_into_tensor"
)


class Transport(Protocol):
    """Sums and gathers tensors over the ranks of one group. Each call returns its algorithm's name, for statistics."""

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
        """Fused all-reduce, residual add and RMSNorm, see the op: (algorithm, norm, next residual).

        Returns None where the transport has no kernel for it, on all ranks alike and with x unchanged.
        """
        ...


class GroupTransport:
    """torch.distributed's own collectives: any backend of the group, any dtype and size."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group
        self.name: str = distributed.get_backend(group)

    def all_reduce_(self, x: torch.Tensor) -> str:
        """See `Transport.all_reduce_`."""
        distributed.all_reduce(x, group=self._group)
        return self.name

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor, dim: int) -> str:
        """See `Transport.all_gather_into`."""
        if dim == 0 or x.shape[0] == 1:  # the ranks' parts are contiguous in out
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
        """See `Transport.all_reduce_add_rms_norm`: always None."""
        return None


class Algorithm(StrEnum):
    """How a payload is exchanged."""

    ONE_SHOT = "one_shot"  # every rank receives every other rank's whole payload
    TWO_SHOT = "two_shot"  # reduce-scatter, then all-gather
    GROUP = "group"  # the group's own backend


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportRule:
    """Limits that choose the algorithm of a payload, in bytes of one rank's input.

    Attributes:
        one_shot_max_bytes: all-reduces up to this size are one-shot, which has the least latency.
        two_shot_max_bytes: larger ones up to this size are two-shot, which moves less data; at least
            `one_shot_max_bytes`. Even larger ones use the group's own backend.
        gather_max_bytes: all-gathers up to this size are one-shot. Larger ones use the group's own backend.
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

        The limits were measured on two ranks (benchmarks/results/collectives-tp2-h200.json). A one-shot all-reduce
        moves data in proportion to the number of other ranks, so its limit is divided by that number. The other limits
        stay. Where torch's two-shot op does not support the number of ranks, nothing is two-shot.
        """
        if num_ranks < 2:
            raise ValueError(f"a group of {num_ranks} has nothing to sum; the rule begins at 2 ranks")
        one_shot = _ONE_SHOT_MAX_BYTES // (num_ranks - 1) // ALIGNMENT * ALIGNMENT
        two_shot = _TWO_SHOT_MAX_BYTES if num_ranks in _TWO_SHOT_RANKS else one_shot
        return cls(one_shot_max_bytes=one_shot, two_shot_max_bytes=two_shot, gather_max_bytes=_GATHER_MAX_BYTES)

    def all_reduce_algorithm(self, num_bytes: int, dtype: torch.dtype, offset: int = 0) -> Algorithm:
        """The algorithm of an all-reduce of `num_bytes` that start `offset` bytes into their storage.

        Empty payloads, dtypes that the kernels cannot sum, and unaligned payloads use the group's backend.
        """
        if dtype not in SYMMETRIC_DTYPES or not num_bytes or (num_bytes | offset) % ALIGNMENT:
            return Algorithm.GROUP
        if num_bytes <= self.one_shot_max_bytes:
            return Algorithm.ONE_SHOT
        return Algorithm.TWO_SHOT if num_bytes <= self.two_shot_max_bytes else Algorithm.GROUP

    def all_gather_algorithm(self, num_bytes: int, row_bytes: int, offset: int = 0) -> Algorithm:
        """The algorithm of an all-gather of rows of `row_bytes`: alignment as for all-reduces, any dtype."""
        if not num_bytes or (num_bytes | row_bytes | offset) % ALIGNMENT:
            return Algorithm.GROUP
        return Algorithm.ONE_SHOT if num_bytes <= self.gather_max_bytes else Algorithm.GROUP


# Of two ranks on H200s, see `TransportRule.measured`.
_ONE_SHOT_MAX_BYTES = 4 << 20  # the kernel's limit: 17.4 us there, two-shot 28.7, NCCL 37.7
_TWO_SHOT_MAX_BYTES = 16 << 20  # 73.4 us there, NCCL 81.9; at 64 MiB NCCL is faster, 256.4 us against 284.0
_TWO_SHOT_RANKS = (2, 4, 8)  # torch.ops.symm_mem.two_shot_all_reduce_out: "Not implemented for world_size=3"
_GATHER_MAX_BYTES = 18 << 20  # the kernel's limit: 67.7 us at 16.2 MiB, NCCL 109.7
