"""Linear layers, whole or sharded over tensor-parallel ranks.

Column-parallel layers shard the outputs and do not communicate. The row-parallel layer shards the inputs and sums its
outputs over the ranks. T tokens, H heads, K kv heads, D head dim, all counted on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from ..ops import all_reduce_, linear
from .parallel import Shard, ShardedModule, TensorParallel, WeightShard, row_shards


class LinearBase(ShardedModule):
    """weight [output size, input size] and an optional bias [output size], as this rank holds them."""

    bias: nn.Parameter | None

    def __init__(self, input_size: int, output_size: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size))
        self.bias = nn.Parameter(torch.empty(output_size)) if bias else None


class _ColumnParallel(LinearBase):
    """Shards of one or more projections of the same input, stacked along the outputs."""

    def __init__(self, input_size: int, shards: tuple[Shard, ...], *, bias: bool) -> None:
        super().__init__(input_size, sum(shard.size for shard in shards), bias=bias)
        self.input_size = input_size
        self.shards = shards

    def weight_shards(self, name: str) -> tuple[WeightShard, ...]:
        return row_shards(self.shards, *((self.input_size,) if name == "weight" else ()))


class ColumnParallelLinear(_ColumnParallel):
    """x [T, input_size] -> [T, output_size / tp_size]."""

    def __init__(self, input_size: int, output_size: int, *, bias: bool = False, tp: TensorParallel) -> None:
        super().__init__(input_size, (tp.shard("output_size", output_size),), bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class MergedColumnParallelLinear(_ColumnParallel):
    """x [T, input_size] -> [T, sum(output_sizes) / tp_size]: this rank's shards of the projections, in order."""

    def __init__(self, input_size: int, output_sizes: Sequence[int], *, bias: bool = False, tp: TensorParallel) -> None:
        super().__init__(input_size, tuple(tp.shard("output_sizes", size) for size in output_sizes), bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class _QKVParallel(_ColumnParallel):
    """The projections of queries, keys and values, by heads.

    `total_num_heads` and `total_num_kv_heads` count all ranks' heads. With more ranks than kv heads, rank r holds kv
    head r // (ranks per kv head). Query heads that do not divide by the ranks are a ValueError.
    """

    query_features: ClassVar[int]  # rows of the query projection per element of a query head

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        total_num_heads: int,
        total_num_kv_heads: int,
        *,
        bias: bool = False,
        tp: TensorParallel,
    ) -> None:
        heads = tp.shard("num_attention_heads", total_num_heads)
        kv_heads = tp.shard_or_replicate("num_key_value_heads", total_num_kv_heads)
        self.num_heads = heads.size
        self.num_kv_heads = kv_heads.size
        self.head_dim = head_dim
        q, kv = (
            Shard(total=shard.total * rows, start=shard.start * rows, size=shard.size * rows)
            for shard, rows in ((heads, self.query_features * head_dim), (kv_heads, head_dim))
        )
        super().__init__(hidden_size, (q, kv, kv), bias=bias)


class QKVParallelLinear(_QKVParallel):
    """x [T, hidden] -> q [T, H, D], k [T, K, D], v [T, K, D], views of one projection."""

    query_features = 1

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        qkv = linear(x, self.weight, self.bias).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        q, k, v = torch.split(qkv, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return q, k, v


class GatedQKVParallelLinear(_QKVParallel):
    """x [T, hidden] -> q with its gate [T, H, 2 D], k [T, K, D], v [T, K, D], views of one projection.

    The query projection has D rows of q, then D rows of the output gate, for each head (Qwen3-Next).
    """

    query_features = 2

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, kv_heads, head_dim = self.num_heads, self.num_kv_heads, self.head_dim
        sizes = [2 * heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        q, k, v = torch.split(linear(x, self.weight, self.bias), sizes, dim=1)
        return q.view(-1, heads, 2 * head_dim), k.view(-1, kv_heads, head_dim), v.view(-1, kv_heads, head_dim)


class RowParallelLinear(LinearBase):
    """x [T, input_size / tp_size] -> [T, output_size], summed over the ranks; rank 0 adds the bias.

    With `reduce_results=False` the result is a partial sum, which a `ResidualRMSNorm(..., tp=tp)` must take.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = False,
        reduce_results: bool = True,
        tp: TensorParallel,
    ) -> None:
        shard = tp.shard("input_size", input_size)
        super().__init__(shard.size, output_size, bias=bias)
        self.tp = tp
        self.reduce_results = reduce_results
        self.shard = shard
        self.output_size = output_size

    def weight_shards(self, name: str) -> tuple[WeightShard, ...]:
        rows = slice(0, self.output_size)
        if name == "bias":
            return (WeightShard(shape=(self.output_size,), source=(rows,), target=(rows,)),)
        return (
            WeightShard(
                shape=(self.output_size, self.shard.total),
                source=(rows, self.shard.rows),
                target=(rows, slice(0, self.shard.size)),
            ),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = linear(x, self.weight, self.bias if self.tp.rank == 0 else None)
        return all_reduce_(out, self.tp.group) if self.reduce_results and self.tp.size > 1 else out
