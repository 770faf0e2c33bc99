"""Model families for Python model execution under a C++ serving framework.

Owns layers, ops, weight loading and the model families. Other packages own attention backends, graphs and the serving
host.
"""

from __future__ import annotations

from .causal_lm import CausalLM
from .config import ModelConfig, RopeConfig
from .layers import TensorParallel
from .loading import DictStateDict, StateDict, WeightError, WeightMap
from .loading.model import load_model, register_port
from .registry import get_model_class, read_model_config, register_model, supported_models

__all__ = [
    "CausalLM",
    "DictStateDict",
    "ModelConfig",
    "RopeConfig",
    "StateDict",
    "TensorParallel",
    "WeightError",
    "WeightMap",
    "get_model_class",
    "load_model",
    "read_model_config",
    "register_model",
    "register_port",
    "supported_models",
]
