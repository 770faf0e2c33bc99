"""The step contract between a C++ LLM serving framework and Python model execution.

Owns the field table and everything that derives from it: the Protocol, the validator, static buffers, the reference
builder, the C++ headers and the handshake. Knows nothing of attention, models or graphs.
"""

from xllm_metadata.builder import BuiltAttentionMetadata, build_attention_metadata
from xllm_metadata.cache import LayerCache
from xllm_metadata.fields import FIELDS, Field, Kind, Padding, When, Where
from xllm_metadata.paths import get_cmake_dir, get_include
from xllm_metadata.protocol import AttentionMetadata
from xllm_metadata.static import StaticAttentionMetadata
from xllm_metadata.validation import validate
from xllm_metadata.version import CONTRACT_VERSION, check_contract

__all__ = [
    "CONTRACT_VERSION",
    "FIELDS",
    "AttentionMetadata",
    "BuiltAttentionMetadata",
    "Field",
    "Kind",
    "LayerCache",
    "Padding",
    "StaticAttentionMetadata",
    "When",
    "Where",
    "build_attention_metadata",
    "check_contract",
    "get_cmake_dir",
    "get_include",
    "validate",
]
