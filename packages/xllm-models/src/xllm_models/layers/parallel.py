"""Which share of a tensor-parallel layer a rank holds, and which part of a checkpoint fills it.

Owns the arithmetic of shards as values. Communication belongs to `ops.collectives`, reading to `loading`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """`count` consecutive rows from `start`, of a checkpoint tensor with `total` rows."""

    total: int
    start: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """This rank's place among those that share every layer, and the name of their process group."""

    rank: int = 0
    size: int = 1
    group: str = "tp"

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"tp_rank {self.rank} is outside the {self.size} ranks of tp_size")

    def cut(self, name: str, total: int) -> Segment:
        """This rank's equal share of `total` rows; a remainder is a ValueError that names `name`."""
        if total % self.size:
            raise ValueError(f"{name} {total} is not divisible by tp_size {self.size}")
        count = total // self.size
        return Segment(total=total, start=self.rank * count, count=count)

    def cut_or_replicate(self, name: str, total: int) -> Segment:
        """As `cut`; with more ranks than rows, each row is held by tp_size / total consecutive ranks."""
        if total >= self.size:
            return self.cut(name, total)
        if self.size % total:
            raise ValueError(f"tp_size {self.size} is not a multiple of {name} {total}")
        return Segment(total=total, start=self.rank // (self.size // total), count=1)

    def cut_padded(self, total: int) -> tuple[Segment, int]:
        """This rank's rows when `total` is padded up to the ranks: (the rows that exist, the rows held)."""
        held = -(-total // self.size)
        start = min(self.rank * held, total)
        return Segment(total=total, start=start, count=min(held, total - start)), held


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A region of a parameter, and the region of a checkpoint tensor that belongs there."""

    shape: tuple[int, ...]  # of the whole checkpoint tensor
    source: tuple[slice, ...]  # region of the checkpoint tensor, one slice a dimension
    target: tuple[slice, ...]  # region of the parameter, one slice a dimension


class PartitionedModule(nn.Module, ABC):
    """A module whose parameters hold parts of checkpoint tensors, rather than one whole tensor each."""

    @abstractmethod
    def parts(self, name: str) -> tuple[Part, ...]:
        """The parts of parameter `name`, in the order in which the weight map lists their sources."""


def row_parts(segments: tuple[Segment, ...], *other_dims: int) -> tuple[Part, ...]:
    """Parts of a parameter that stacks `segments` along dimension 0, each with whole other dimensions."""
    whole = tuple(slice(0, size) for size in other_dims)
    parts = []
    offset = 0
    for segment in segments:
        parts.append(
            Part(
                shape=(segment.total, *other_dims),
                source=(slice(segment.start, segment.start + segment.count), *whole),
                target=(slice(offset, offset + segment.count), *whole),
            )
        )
        offset += segment.count
    return tuple(parts)
