"""Layers of a model: linear, embedding and head, norm, rotary embedding, dense and mixture-of-experts MLP."""

from __future__ import annotations

from .linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from .mlp import GatedMLP
from .moe import Experts, SparseMoE, TopKRouter
from .norm import ResidualLayerNorm, ResidualRMSNorm, RMSNorm
from .parallel import KeepDtypeParameter, Shard, ShardedModule, TensorParallel, WeightShard, row_shards
from .prefetch import PrefetchingModule
from .rotary import RotaryEmbedding
from .vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

__all__ = [
    "ColumnParallelLinear",
    "Experts",
    "GatedMLP",
    "KeepDtypeParameter",
    "LinearBase",
    "MergedColumnParallelLinear",
    "ParallelLMHead",
    "PrefetchingModule",
    "QKVParallelLinear",
    "RMSNorm",
    "ResidualLayerNorm",
    "ResidualRMSNorm",
    "RotaryEmbedding",
    "RowParallelLinear",
    "Shard",
    "ShardedModule",
    "SparseMoE",
    "TensorParallel",
    "TopKRouter",
    "VocabParallelEmbedding",
    "WeightShard",
    "row_shards",
]
