"""Building blocks of a model: linear, vocabulary, norm, rotary and feed-forward layers, dense and sparse."""

from __future__ import annotations

from .linear import ColumnLinear, GateUpLinear, MergedLinear, QKVLinear, RowLinear
from .mlp import GatedMLP
from .moe import SparseMoE
from .norm import ResidualLayerNorm, ResidualRMSNorm, RMSNorm
from .parallel import Part, PartitionedModule, Segment, TensorParallel
from .rotary import RotaryEmbedding
from .vocabulary import LMHead, VocabularyEmbedding

__all__ = [
    "ColumnLinear",
    "GateUpLinear",
    "GatedMLP",
    "LMHead",
    "MergedLinear",
    "Part",
    "PartitionedModule",
    "QKVLinear",
    "RMSNorm",
    "ResidualLayerNorm",
    "ResidualRMSNorm",
    "RotaryEmbedding",
    "RowLinear",
    "Segment",
    "SparseMoE",
    "TensorParallel",
    "VocabularyEmbedding",
]
