"""Attention for models that run under a C++ serving framework.

Owns the layers `Attention` and `StateLayer` and their ops, the forward context, the backend interface and the built-in
backends over a paged KV cache. Knows nothing of models, graphs or scheduling. Importing it touches no device and no
kernel library.
"""

from .backend import AttentionBackend, BackendCapabilities, Phase, Step
from .context import current_backend, forward_context
from .fp8_cache import CacheScales
from .gated_delta_net import GatedDeltaNetSpec
from .kv_groups import group_windows, kv_groups
from .layer import Attention
from .limits import BackendLimits
from .registry import available_backends, create_backend, unavailable_backends
from .spec import AttentionSpec, LayerSpec
from .state import StateLayer, StateSpec, StateStep

__all__ = [
    "Attention",
    "AttentionBackend",
    "AttentionSpec",
    "BackendCapabilities",
    "BackendLimits",
    "CacheScales",
    "GatedDeltaNetSpec",
    "LayerSpec",
    "Phase",
    "StateLayer",
    "StateSpec",
    "StateStep",
    "Step",
    "available_backends",
    "create_backend",
    "current_backend",
    "forward_context",
    "group_windows",
    "kv_groups",
    "unavailable_backends",
]
