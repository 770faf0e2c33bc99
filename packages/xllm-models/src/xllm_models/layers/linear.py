"""Linear layers, whole or sharded over tensor-parallel ranks.

Column layers cut the outputs and need no communication; the row layer cuts the inputs and sums over the ranks.
T tokens, H heads, K kv heads, D head dim, all counted on this rank.
"""

from __future__ import annotations

import torch
from torch import nn

from ..ops import all_reduce_, linear
from .parallel import Part, PartitionedModule, Segment, TensorParallel, row_parts


class MergedLinear(PartitionedModule):
    """Several projections of one input, computed as one: weight [sum of the segments' rows, in_features]."""

    bias: nn.Parameter | None

    def __init__(self, in_features: int, segments: tuple[Segment, ...], *, bias: bool) -> None:
        super().__init__()
        self.in_features = in_features
        self.segments = segments
        rows = sum(segment.count for segment in segments)
        self.weight = nn.Parameter(torch.empty(rows, in_features))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None

    def parts(self, name: str) -> tuple[Part, ...]:
        return row_parts(self.segments, *((self.in_features,) if name == "weight" else ()))

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class ColumnParallelLinear(MergedLinear):
    """x [T, in_features] -> [T, out_features / tp_size]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, tp: TensorParallel) -> None:
        super().__init__(in_features, (tp.cut("out_features", out_features),), bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x)


class GateUpLinear(MergedLinear):
    """x [T, hidden] -> [T, 2 * intermediate / tp_size]: this rank's gate, then its up projection."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False, tp: TensorParallel) -> None:
        segment = tp.cut("intermediate_size", intermediate_size)
        super().__init__(hidden_size, (segment, segment), bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x)


class QKVParallelLinear(MergedLinear):
    """x [T, hidden] -> q [T, H, D], k [T, K, D], v [T, K, D], views of one projection.

    With more ranks than kv heads, rank r holds kv head r // (ranks per kv head). Query heads that do not divide by
    the ranks are a ValueError.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        tp: TensorParallel,
    ) -> None:
        heads = tp.cut("num_attention_heads", num_heads)
        kv_heads = tp.cut_or_replicate("num_key_value_heads", num_kv_heads)
        self.num_heads = heads.count
        self.num_kv_heads = kv_heads.count
        self.head_dim = head_dim
        q, kv = (
            Segment(total=s.total * head_dim, start=s.start * head_dim, count=s.count * head_dim)
            for s in (heads, kv_heads)
        )
        super().__init__(hidden_size, (q, kv, kv), bias=bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        qkv = self.project(x).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        q, k, v = torch.split(qkv, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return q, k, v


class RowParallelLinear(PartitionedModule):
    """x [T, in_features / tp_size] -> [T, out_features], summed over the ranks; rank 0 adds the bias.

    With `reduce` off the result is this rank's term of the sum, for a `ResidualRMSNorm(..., tp=tp)` to take.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        reduce: bool = True,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.reduce = reduce
        self.segment = tp.cut("in_features", in_features)
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, self.segment.count))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def parts(self, name: str) -> tuple[Part, ...]:
        rows = slice(0, self.out_features)
        if name == "bias":
            return (Part(shape=(self.out_features,), source=(rows,), target=(rows,)),)
        columns = slice(self.segment.start, self.segment.start + self.segment.count)
        return (
            Part(
                shape=(self.out_features, self.segment.total),
                source=(rows, columns),
                target=(rows, slice(0, self.segment.count)),
            ),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = linear(x, self.weight, self.bias if self.tp.rank == 0 else None)
        return all_reduce_(out, self.tp.group) if self.reduce and self.tp.size > 1 else out
