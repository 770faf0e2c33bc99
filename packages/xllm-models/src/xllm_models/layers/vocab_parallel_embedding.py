"""Embedding and language-model head, whose vocabulary is sharded over the tensor-parallel ranks.

The vocabulary is padded to a multiple of tp_size, so any size works with any number of ranks. T tokens, V vocabulary.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.nn import functional

from ..ops import all_gather, all_reduce_, embedding_shard, linear
from .parallel import ShardedModule, TensorParallel, WeightShard, row_shards


@cache
def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype, device="cpu"))


class _VocabularyRows(ShardedModule):
    """weight [V padded / tp_size, hidden]; rows beyond the vocabulary are zero."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.tp = tp
        self.shard, num_rows = tp.shard_padded(vocab_size)
        self.weight = nn.Parameter(torch.empty(num_rows, hidden_size))

    def weight_shards(self, name: str) -> tuple[WeightShard, ...]:
        return row_shards((self.shard,), self.hidden_size)


class VocabParallelEmbedding(_VocabularyRows):
    """input_ids [T] int32 or int64 -> [T, hidden], times `scale` rounded to the weights' dtype.

    An id outside [0, V) has a row of NaN. A model of one rank on the CPU raises an IndexError instead: there torch's
    embedding is faster, and checks the ids.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, scale: float = 1.0, tp: TensorParallel) -> None:
        super().__init__(vocab_size, hidden_size, tp)
        self.scale = scale

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        rows = self._rows(input_ids)
        if self.scale == 1.0:
            return rows
        return rows * _rounded(self.scale, rows.dtype)

    def _rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1 and input_ids.device.type == "cpu":
            return functional.embedding(input_ids, self.weight)
        # On CUDA torch's embedding asserts in the kernel, after which the process cannot use the device any more.
        rows = embedding_shard(input_ids, self.weight, self.shard.start, self.shard.size, self.vocab_size)
        return rows if self.tp.size == 1 else all_reduce_(rows, self.tp.group)


class ParallelLMHead(_VocabularyRows):
    """hidden [n, hidden] -> logits [n, V] on every rank. `tied`: the embedding whose weight the head shares."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: VocabParallelEmbedding | None = None,
        tp: TensorParallel,
    ) -> None:
        super().__init__(vocab_size, hidden_size, tp)
        if tied is not None:
            self.weight = tied.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = linear(hidden, self.weight)
        if self.tp.size == 1:
            return logits
        return all_gather(logits, self.tp.size, self.tp.group, dim=1)[:, : self.vocab_size].contiguous()
