"""`ModelConfig`: the typed configuration of a model, parsed from config.json (HF names) or ModelArgs names.

Owns the fields and their checks. The list of architectures belongs to `registry`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from .keys import ConfigKeys
from .moe import MoEConfig
from .own import OWN_CONFIG, parse_own
from .quantization import Quantization, parse_quantization
from .rope import RopeConfig, parse_layer_ropes
from .text import text_config
from .unread import OPTIONAL_KEYS, split_unread, without_partial_rotary
from .windows import LAYER_TYPES, SLIDING, check_layer_types, parse_windows

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
)

KV_CACHE_DTYPES: Mapping[str, torch.dtype | None] = MappingProxyType(
    {"auto": None, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
)


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name, with or without the prefix `torch.`. An unknown name is a ValueError."""
    short = name.removeprefix("torch.")
    if short not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported; supported: {list(DTYPES)}")
    return DTYPES[short]


def parse_kv_cache_dtype(name: str) -> torch.dtype | None:
    """The dtype of the KV cache in vLLM's names; None, for `auto`, is the model's. An unknown name is a ValueError."""
    if name not in KV_CACHE_DTYPES:
        raise ValueError(f"kv_cache_dtype {name!r} is not supported; supported: {list(KV_CACHE_DTYPES)}")
    return KV_CACHE_DTYPES[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder's structure. All sizes are those of the whole model, not of one rank."""

    architecture: str  # the first of HF's `architectures`, or the model type
    model_type: str
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    rope: RopeConfig
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    sliding_window: int  # keys that a query sees, its own included; 0: no layer has a window
    max_window_layers: int  # without layer_types: the first layer with a sliding window
    layer_types: tuple[str, ...]  # one per layer, or empty
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sliding_rope: RopeConfig | None = None  # of the layers with a sliding window; None: `rope`
    moe: MoEConfig | None = None
    query_pre_attn_scalar: float | None = None  # the attention scale is its power -0.5; None: head_dim's
    final_logit_softcapping: float = 0.0  # 0: none
    quantization: Quantization | None = None  # of the checkpoint; not in ModelArgs
    max_model_len: int = 0  # the longest sequence to serve; 0: all positions
    kv_cache_dtype: torch.dtype | None = None  # of keys and values in the cache; None: the model's
    own: Mapping[str, Any] = field(default_factory=dict, hash=False)  # the family's own keys, see CausalLM.own_config
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # the text model's keys, as given
    unread: Mapping[str, Any] = field(default_factory=dict, compare=False)  # given, but without effect in this family

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}")

    @property
    def num_positions(self) -> int:
        """The number of positions to serve: `max_model_len`, or else as `RopeConfig.num_positions`."""
        if self.max_model_len:
            return min(self.max_model_len, self.max_num_positions)
        return self.rope.num_positions(self.max_position_embeddings)

    @property
    def max_num_positions(self) -> int:
        """The largest `max_model_len`. Rope scaling extends it beyond max_position_embeddings."""
        return self.rope.max_num_positions(self.max_position_embeddings)

    def slides(self, layer_id: int) -> bool:
        """Whether the layer has a sliding window: by `layer_types`, or else from layer `max_window_layers` on."""
        if self.layer_types:
            return self.layer_types[layer_id] == SLIDING
        return layer_id >= self.max_window_layers

    def window(self, layer_id: int) -> int:
        """The layer's sliding window, 0 for none."""
        return self.sliding_window if self.slides(layer_id) else 0

    @classmethod
    def from_dict(
        cls,
        raw: Mapping[str, Any],
        *,
        defaults: Mapping[str, Any] | None = None,
        own: Mapping[str, Any] | None = None,
        reads: Collection[str] | None = None,
        layer_types: Collection[str] = LAYER_TYPES,
    ) -> ModelConfig:
        """Parse HF config.json names or ModelArgs names. `CausalLM.parse_config` adds the family's arguments.

        ValueError, with its name, for a missing, contradictory or wrongly typed key, an unsupported quantization, and
        an unknown dtype, rope type or layer type.

        Args:
            raw: the configuration.
            defaults: the family's defaults for absent keys, in HF names.
            own: the keys that only this family has, with their defaults.
            reads: the optional keys (`OPTIONAL_KEYS`) that the family reads; None: all. The others have no effect.
            layer_types: the layer types that the family has.
        """
        given = text_config(raw)
        _check_supported(given, reads)
        reads = OPTIONAL_KEYS if reads is None else reads
        raw, unread = split_unread(given, reads)
        keys = ConfigKeys(raw, defaults=defaults)
        hidden_size = keys.integer("hidden_size")
        num_heads, num_kv_heads, head_dim = _heads(keys, hidden_size)
        max_position_embeddings = keys.integer("max_position_embeddings")
        rope, sliding_rope = parse_layer_ropes(raw, max_position_embeddings, defaults)
        if "partial_rotary_factor" not in reads:
            rope = without_partial_rotary(rope, unread)
            sliding_rope = sliding_rope and without_partial_rotary(sliding_rope, unread)
        num_layers = keys.integer("num_hidden_layers", "n_layers")
        check_layer_types(given, num_layers, layer_types)
        windows = parse_windows(keys, num_layers, layer_types)
        architectures = keys.strings("architectures")
        model_type = keys.string("model_type", default=architectures[0] if architectures else None)
        return cls(
            architecture=architectures[0] if architectures else model_type,
            model_type=model_type,
            dtype=parse_dtype(keys.string("dtype", "torch_dtype", default="float32")),
            vocab_size=keys.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=keys.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=keys.number("rms_norm_eps", default=1e-6),
            hidden_act=keys.string("hidden_act", "hidden_activation", default="silu"),
            rope=rope,
            sliding_rope=sliding_rope,
            attention_bias=keys.boolean("attention_bias", default=False),
            mlp_bias=keys.boolean("mlp_bias", default=False),
            tie_word_embeddings=keys.boolean("tie_word_embeddings", default=False),
            sliding_window=windows.sliding_window,
            max_window_layers=windows.max_window_layers,
            layer_types=windows.layer_types,
            moe=MoEConfig.parse(keys),
            query_pre_attn_scalar=keys.optional_float("query_pre_attn_scalar"),
            final_logit_softcapping=keys.number("final_logit_softcapping", default=0.0),
            bos_token_id=keys.optional_int("bos_token_id"),
            eos_token_ids=_eos_token_ids(keys),
            quantization=parse_quantization(raw),
            own=parse_own(keys, own or {}),
            raw=given,
            unread=unread,
        )

    def to_model_args(self) -> dict[str, Any]:
        """Plain values under ModelArgs names, which `from_dict` parses to an equal config."""
        args: dict[str, Any] = {
            "model_type": self.model_type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "n_layers": self.num_layers,
            "n_heads": self.num_heads,
            "n_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": self.hidden_act,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "tie_word_embeddings": self.tie_word_embeddings,
            "use_sliding_window": self.sliding_window > 0,
            "sliding_window": self.sliding_window,
            "max_window_layers": self.max_window_layers,
            "layer_types": list(self.layer_types),
            "eos_token_ids": list(self.eos_token_ids),
        }
        if self.bos_token_id is not None:
            args["bos_token_id"] = self.bos_token_id
        if self.architecture != self.model_type:
            args["architectures"] = [self.architecture]
        if self.sliding_rope is not None:
            args["rope_local_base_freq"] = self.sliding_rope.theta
        if self.query_pre_attn_scalar is not None:
            args["query_pre_attn_scalar"] = self.query_pre_attn_scalar
        if self.final_logit_softcapping:
            args["final_logit_softcapping"] = self.final_logit_softcapping
        if self.own:
            args[OWN_CONFIG] = json.dumps(dict(self.own))
        if self.moe is not None:
            args |= self.moe.to_model_args()
        return args | self.rope.to_model_args()


def _heads(keys: ConfigKeys, hidden_size: int) -> tuple[int, int, int]:
    """Heads, kv heads and the size of a head."""
    num_heads = keys.integer("num_attention_heads", "n_heads")
    head_dim = keys.optional_int("head_dim")
    if head_dim is None:
        if num_heads < 1 or hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} is not divisible by num_attention_heads {num_heads}")
        head_dim = hidden_size // num_heads
    # An explicit null means one kv head per head, also where the family has another default.
    null = keys.is_null("num_key_value_heads") and keys.find("n_kv_heads") is None
    num_kv_heads = num_heads if null else keys.integer("num_key_value_heads", "n_kv_heads", default=num_heads)
    return num_heads, num_kv_heads, head_dim


def _check_supported(raw: Mapping[str, Any], reads: Collection[str] | None) -> None:
    """Refuse what no family does, and rope parameters that have one mapping for all layers where the family reads one
    per layer type, or the reverse."""
    if raw.get("per_layer_config"):
        raise ValueError(f"per_layer_config {raw['per_layer_config']!r} is not supported; it must be absent or empty")
    given = raw.get("rope_parameters") or {}
    nested = [key for key, value in given.items() if isinstance(value, Mapping)]
    if reads is None or not given:
        return
    if nested and "rope_local_base_freq" not in reads:
        raise ValueError(
            f"rope_parameters per layer type ({', '.join(nested)}) are not supported by this family; allowed: one "
            "mapping for all layers"
        )
    if not nested and "rope_local_base_freq" in reads:
        raise ValueError(
            f"rope_parameters {given!r} are not supported by this family; allowed: one mapping per layer type, "
            f"{' and '.join(LAYER_TYPES)}"
        )


def _eos_token_ids(keys: ConfigKeys) -> tuple[int, ...]:
    first, several = keys.integers("eos_token_id"), keys.integers("eos_token_ids")
    if several and not set(first) <= set(several):
        raise ValueError(
            f"contradictory keys in config: eos_token_id={list(first)} is not among eos_token_ids={list(several)}"
        )
    return several or first
