"""One rank's shard of a vocabulary-parallel embedding, as an op. Summing the shards belongs to `ops.collectives`."""

from __future__ import annotations

import torch
from torch.nn import functional

from xllm_attention.op_library import define_op

from .triton_kernels import triton_kernel


def _embedding_shard_fake(input_ids: torch.Tensor, weight: torch.Tensor, start: int, count: int) -> torch.Tensor:
    return weight.new_empty((*input_ids.shape, weight.shape[1]))


@define_op(fake=_embedding_shard_fake, kernels=triton_kernel("embedding", "embedding_shard"))
def _embedding_shard(input_ids: torch.Tensor, weight: torch.Tensor, start: int, count: int) -> torch.Tensor:
    local = input_ids - start
    elsewhere = (local < 0) | (local >= count)
    rows = functional.embedding(local.masked_fill(elsewhere, 0), weight)
    return rows.masked_fill_(elsewhere.unsqueeze(-1), 0)


def embedding_shard(input_ids: torch.Tensor, weight: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Embedding rows of the ids in this rank's shard, and zeros for other ids: the sum over the ranks is the embedding.

    input_ids [T] int32 or int64, any values; weight [rows, N], whose first `count` rows belong to ids `start` and up
    -> [T, N] of weight's dtype, contiguous. A count beyond weight's rows is a ValueError.
    """
    if not 0 <= count <= weight.shape[0]:
        raise ValueError(f"count {count} is not within the weight's {weight.shape[0]} rows")
    return _embedding_shard(input_ids, weight, start, count)
