"""Layers of a model: linear, embedding and head, norm, rotary embedding, linear attention, MLPs, experts, routers."""

from __future__ import annotations

from .biased_experts import BiasedExperts, BiasedSparseMoE
from .gated_attention import GatedAttention
from .gated_delta_net import GroupedGatedDeltaNet, MergedGatedDeltaNet
from .grouped_router import GROUPED_ROUTING, GroupedSigmoidRouter, GroupedSoftmaxRouter
from .latent_attention import LATENT_ATTENTION, LatentAttention
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
from .shared_experts import GatedSharedExpertMoE, SharedExpertsMoE
from .vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

__all__ = [
    "GROUPED_ROUTING",
    "LATENT_ATTENTION",
    "BiasedExperts",
    "BiasedSparseMoE",
    "ColumnParallelLinear",
    "Experts",
    "GatedAttention",
    "GatedMLP",
    "GatedSharedExpertMoE",
    "GroupedGatedDeltaNet",
    "GroupedSigmoidRouter",
    "GroupedSoftmaxRouter",
    "KeepDtypeParameter",
    "LatentAttention",
    "LinearBase",
    "MergedColumnParallelLinear",
    "MergedGatedDeltaNet",
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
    "SharedExpertsMoE",
    "SparseMoE",
    "TensorParallel",
    "TopKRouter",
    "VocabParallelEmbedding",
    "WeightShard",
    "row_shards",
]
