"""Shards of tensor-parallel layers: which rows a rank holds, and which region of a checkpoint tensor fills them.

Owns the arithmetic of shards, and parameters with a dtype of their own. Communication belongs to `ops.collectives`,
reading to `loading`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import nn


class KeepDtypeParameter(nn.Parameter):
    """A parameter that keeps the dtype of its tensor in a model of any dtype.

    For the names in `_keep_in_fp32_modules_strict` of an HF model: `KeepDtypeParameter(torch.empty(n,
    dtype=torch.float32))`. Buffers keep their dtype without it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """`size` consecutive rows from `start` on, of a checkpoint tensor with `total` rows."""

    total: int
    start: int
    size: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """This process's rank among the ranks that share every layer, and the name of their process group."""

    rank: int = 0
    size: int = 1
    group: str = "tp"

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"tp_rank {self.rank} is outside the {self.size} ranks of tp_size")

    def shard(self, name: str, total: int) -> Shard:
        """This rank's equal share of `total` rows; a remainder is a ValueError that names `name`."""
        if total % self.size:
            raise ValueError(f"{name} {total} is not divisible by tp_size {self.size}")
        size = total // self.size
        return Shard(total=total, start=self.rank * size, size=size)

    def shard_or_replicate(self, name: str, total: int) -> Shard:
        """As `shard`; with more ranks than rows, tp_size / total consecutive ranks hold the same row."""
        if total >= self.size:
            return self.shard(name, total)
        if self.size % total:
            raise ValueError(f"tp_size {self.size} is not a multiple of {name} {total}")
        return Shard(total=total, start=self.rank // (self.size // total), size=1)

    def shard_padded(self, total: int) -> tuple[Shard, int]:
        """Shards of `total` rows padded to a multiple of tp_size: (this rank's real rows, rows with padding)."""
        padded = -(-total // self.size)
        start = min(self.rank * padded, total)
        return Shard(total=total, start=start, size=min(padded, total - start)), padded


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightShard:
    """A region of a parameter, and the region of a checkpoint tensor that is loaded into it."""

    shape: tuple[int, ...]  # of the whole checkpoint tensor
    source: tuple[slice, ...]  # region of the checkpoint tensor, one slice per dimension
    target: tuple[slice, ...]  # region of the parameter, one slice per dimension


def whole_shard(tensor: torch.Tensor) -> WeightShard:
    """The shard of a tensor that every rank holds whole."""
    region = tuple(slice(0, size) for size in tensor.shape)
    return WeightShard(shape=tuple(tensor.shape), source=region, target=region)


class ShardedModule(nn.Module, ABC):
    """A module whose parameters hold shards of checkpoint tensors, or several checkpoint tensors in one parameter."""

    @abstractmethod
    def weight_shards(self, name: str) -> tuple[WeightShard, ...]:
        """The regions of parameter or buffer `name`, in the order in which the weight map lists their tensors.

        This implementation is for a tensor that every rank holds whole: call it with super() for such names.
        """
        return (whole_shard(getattr(self, name)),)


def row_shards(shards: tuple[Shard, ...], *other_dims: int) -> tuple[WeightShard, ...]:
    """The regions of a parameter that stacks `shards` along dimension 0 and holds the other dimensions whole."""
    whole = tuple(slice(0, size) for size in other_dims)
    regions = []
    offset = 0
    for shard in shards:
        regions.append(
            WeightShard(
                shape=(shard.total, *other_dims),
                source=(shard.rows, *whole),
                target=(slice(offset, offset + shard.size), *whole),
            )
        )
        offset += shard.size
    return tuple(regions)
