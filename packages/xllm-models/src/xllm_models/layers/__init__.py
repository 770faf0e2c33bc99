"""Building blocks of a model: linear, vocabulary, norm, rotary and feed-forward layers, dense and sparse."""

from __future__ import annotations

from .linear import ColumnParallelLinear, GateUpLinear, MergedLinear, QKVParallelLinear, RowParallelLinear
from .mlp import GatedMLP
from .moe import SparseMoE
from .norm import ResidualLayerNorm, ResidualRMSNorm, RMSNorm
from .parallel import Part, PartitionedModule, Segment, TensorParallel
from .prefetch import PrefetchingModule
from .rotary import RotaryEmbedding
from .vocabulary import ParallelLMHead, VocabParallelEmbedding

__all__ = [
    "ColumnParallelLinear",
    "GateUpLinear",
    "GatedMLP",
    "MergedLinear",
    "ParallelLMHead",
    "Part",
    "PartitionedModule",
    "PrefetchingModule",
    "QKVParallelLinear",
    "RMSNorm",
    "ResidualLayerNorm",
    "ResidualRMSNorm",
    "RotaryEmbedding",
    "RowParallelLinear",
    "Segment",
    "SparseMoE",
    "TensorParallel",
    "VocabParallelEmbedding",
]
