"""Attention for models that run under a C++ serving framework.

Owns the `Attention` layer and its op, the forward context, the backend interface and the built-in backends over a
paged KV cache. Knows nothing of models, graphs or scheduling. Importing it touches no device and no kernel library.
"""

from .backend import AttentionBackend, BackendCapabilities, Phase, Step
from .context import current_backend, forward_context
from .layer import Attention
from .limits import BackendLimits
from .registry import available_backends, create_backend, unavailable_backends
from .spec import AttentionSpec

__all__ = [
    "Attention",
    "AttentionBackend",
    "AttentionSpec",
    "BackendCapabilities",
    "BackendLimits",
    "Phase",
    "Step",
    "available_backends",
    "create_backend",
    "current_backend",
    "forward_context",
    "unavailable_backends",
]
