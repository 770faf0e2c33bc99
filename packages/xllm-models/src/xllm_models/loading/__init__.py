"""Loads weights: state dicts, the map of names, and the strict loader.

`model` holds `load_model`, which is not imported here: model classes import this package.
"""

from __future__ import annotations

from .cache_scales import read_cache_scales
from .checkpoint import open_checkpoint
from .layout import in_layer_layout
from .loader import WeightError, load_weights
from .prefix import without_prefixes
from .quantized import dequantized
from .state_dict import DictStateDict, SafetensorsStateDict, SliceableStateDict, StateDict, TensorSlice
from .weight_map import WeightMap

__all__ = [
    "DictStateDict",
    "SafetensorsStateDict",
    "SliceableStateDict",
    "StateDict",
    "TensorSlice",
    "WeightError",
    "WeightMap",
    "dequantized",
    "in_layer_layout",
    "load_weights",
    "open_checkpoint",
    "read_cache_scales",
    "without_prefixes",
]
