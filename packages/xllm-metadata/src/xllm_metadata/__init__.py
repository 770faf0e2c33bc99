"""The step contract between a C++ LLM serving framework and Python model execution.

Holds the field table (`AttentionMetadata`) and all that derives from it: the validator, static buffers, the reference
builder, the C++ headers and the version handshake. Depends on no other package of this repository.
"""

from .builder import build_attention_metadata
from .built import BuiltAttentionMetadata
from .cache import CacheKind, CacheSpec, LayerCache, allocate_caches
from .fields import FIELDS
from .paths import get_cmake_dir, get_include
from .protocol import AttentionMetadata
from .schema import Field, FieldType, MemorySpace, Padding, Presence
from .static import StaticAttentionMetadata
from .step_check import check_step
from .validation import check_present, validate
from .version import CONTRACT_VERSION, check_contract

__all__ = [
    "CONTRACT_VERSION",
    "FIELDS",
    "AttentionMetadata",
    "BuiltAttentionMetadata",
    "CacheKind",
    "CacheSpec",
    "Field",
    "FieldType",
    "LayerCache",
    "MemorySpace",
    "Padding",
    "Presence",
    "StaticAttentionMetadata",
    "allocate_caches",
    "build_attention_metadata",
    "check_contract",
    "check_present",
    "check_step",
    "get_cmake_dir",
    "get_include",
    "validate",
]
