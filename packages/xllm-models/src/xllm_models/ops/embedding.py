"""One rank's shard of a vocabulary-parallel embedding, as an op. Summing the shards belongs to `ops.collectives`."""

from __future__ import annotations

import torch
from torch.nn import functional

from xllm_attention.op_library import define_op

from .triton_kernels import triton_kernel


def _embedding_shard_fake(
    input_ids: torch.Tensor, weight: torch.Tensor, start: int, count: int, vocab_size: int
) -> torch.Tensor:
    return weight.new_empty((*input_ids.shape, weight.shape[1]))


@define_op(fake=_embedding_shard_fake, kernels=triton_kernel("embedding", "embedding_shard"))
def _embedding_shard(
    input_ids: torch.Tensor, weight: torch.Tensor, start: int, count: int, vocab_size: int
) -> torch.Tensor:
    outside = (input_ids < 0) | (input_ids >= vocab_size)
    elsewhere = outside | (input_ids < start) | (input_ids >= start + count)
    rows = functional.embedding((input_ids - start).masked_fill(elsewhere, 0), weight)
    absent = weight.new_zeros(input_ids.shape).masked_fill(outside, torch.nan)
    return torch.where(elsewhere.unsqueeze(-1), absent.unsqueeze(-1), rows)


def embedding_shard(
    input_ids: torch.Tensor, weight: torch.Tensor, start: int, count: int, vocab_size: int
) -> torch.Tensor:
    """Embedding rows of the ids in this rank's shard, and zeros for other ids: the sum over the ranks is the embedding.

    An id outside the vocabulary has a row of NaN on every rank. So its logits are NaN, which no sampler takes for an
    answer. The rows of other ids do not depend on it.

    input_ids [T] int32 or int64, any values; weight [rows, N], whose first `count` rows belong to ids `start` and up;
    vocab_size: number of ids over all ranks -> [T, N] of weight's dtype, contiguous. A count beyond weight's rows is a
    ValueError.
    """
    if not 0 <= count <= weight.shape[0]:
        raise ValueError(f"count {count} is not within the weight's {weight.shape[0]} rows")
    return _embedding_shard(input_ids, weight, start, count, vocab_size)
