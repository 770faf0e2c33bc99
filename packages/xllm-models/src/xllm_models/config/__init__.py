"""The configuration of a model: parsed once, from config.json or ModelArgs names, into typed values.

`model` holds `ModelConfig`; `rope`, `moe`, `quantization` and `own` hold its parts; `keys` reads typed values.
"""

from __future__ import annotations

from .checkpoint import read_config
from .keys import ConfigKeys
from .model import DTYPES, ModelConfig, parse_dtype
from .moe import MoEConfig
from .quantization import Quantization, parse_quantization
from .rope import RopeConfig, parse_layer_ropes, parse_rope
from .text import TEXT_MODEL_TYPE, text_config

__all__ = [
    "DTYPES",
    "TEXT_MODEL_TYPE",
    "ConfigKeys",
    "MoEConfig",
    "ModelConfig",
    "Quantization",
    "RopeConfig",
    "parse_dtype",
    "parse_layer_ropes",
    "parse_quantization",
    "parse_rope",
    "read_config",
    "text_config",
]
