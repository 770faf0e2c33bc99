"""The configuration of a model: parsed once, from config.json or ModelArgs names, into typed values.

`model` holds `ModelConfig`; `rope`, `windows`, `moe`, `quantization` and `own` hold its parts; `keys` reads typed
values. `text` finds a nested text model's keys, `unread` leaves out those that a family does not read.
"""

from __future__ import annotations

from .checkpoint import read_config
from .keys import ConfigKeys
from .model import DTYPES, KV_CACHE_DTYPES, ModelConfig, parse_dtype, parse_kv_cache_dtype
from .moe import MoEConfig
from .quantization import Quantization, parse_quantization
from .rope import RopeConfig, parse_layer_ropes, parse_rope
from .text import TEXT_MODEL_TYPE, text_config, without_mrope
from .unread import EXPERT_KEYS, GEMMA_KEYS, OPTIONAL_KEYS, QWEN_WINDOW_KEYS, ROUTED_EXPERT_KEYS
from .windows import FULL, LAYER_TYPES, LINEAR, with_linear_layers

__all__ = [
    "DTYPES",
    "EXPERT_KEYS",
    "FULL",
    "GEMMA_KEYS",
    "KV_CACHE_DTYPES",
    "LAYER_TYPES",
    "LINEAR",
    "OPTIONAL_KEYS",
    "QWEN_WINDOW_KEYS",
    "ROUTED_EXPERT_KEYS",
    "TEXT_MODEL_TYPE",
    "ConfigKeys",
    "MoEConfig",
    "ModelConfig",
    "Quantization",
    "RopeConfig",
    "parse_dtype",
    "parse_kv_cache_dtype",
    "parse_layer_ropes",
    "parse_quantization",
    "parse_rope",
    "read_config",
    "text_config",
    "with_linear_layers",
    "without_mrope",
]
