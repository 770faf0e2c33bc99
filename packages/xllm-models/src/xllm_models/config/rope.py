"""Rotary embedding parameters, parsed from every spelling in use.

Owns the parsing: `rope_theta` with `rope_scaling`, `rope_parameters`, and the flat `rope_scaling_*` names of ModelArgs.
The frequencies belong to `layers.rotary`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .keys import ConfigKeys

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")

# Other names of types. Qwen-VL's mrope takes three positions per token, which are equal for text.
_TYPE_NAMES = {"su": "longrope", "mrope": "default"}

# The flat ModelArgs name of a parameter is this prefix and the name inside rope_parameters.
_FLAT = "rope_scaling_"
_FLAT_NAMES = (
    "rope_type",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "short_factor",
    "long_factor",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Parameters of one rotary embedding; those that the type does not use keep their defaults."""

    rope_type: str = "default"
    theta: float = 10000.0
    partial_rotary_factor: float = 1.0  # the fraction of a head's features that is rotated
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # the trained length; dynamic, llama3, yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn, longrope; None: from the factor (and yarn's mscales)
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope, one per frequency: the divisors up to the trained length
    long_factor: tuple[float, ...] = ()  # longrope: those beyond it

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope type {self.rope_type!r} is not supported; supported: {list(ROPE_TYPES)}")
        if self.theta <= 0 or self.factor <= 0:
            raise ValueError(f"rope theta and factor must be positive, got {self.theta} and {self.factor}")
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope high_freq_factor {self.high_freq_factor} must exceed low_freq_factor {self.low_freq_factor}"
            )

    @property
    def attention_scaling(self) -> float:
        """The factor of cosines and sines: 1, or the temperature of yarn (arXiv:2309.00071, 3.4) and of longrope
        (arXiv:2402.13753)."""
        if self.rope_type not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rope_type == "longrope":
            longer = max(math.log(self.factor), 0.0)
            return math.sqrt(1.0 + longer / math.log(self.original_max_position_embeddings))
        if self.mscale and self.mscale_all_dim:
            return _yarn_scale(self.factor, self.mscale) / _yarn_scale(self.factor, self.mscale_all_dim)
        return _yarn_scale(self.factor, 1.0)

    @property
    def softmax_scaling(self) -> float:
        """The factor of the softmax scale in DeepSeek's attention: the square of yarn's mscale of all dimensions."""
        if self.rope_type == "default" or not self.mscale_all_dim:
            return 1.0
        return _yarn_scale(self.factor, self.mscale_all_dim) ** 2

    def num_positions(self, max_position_embeddings: int) -> int:
        """Positions to serve by default: `max_position_embeddings`, or for dynamic and yarn the extended length.

        Published models of the other types have the extended length in `max_position_embeddings` already.
        """
        extended = self.max_num_positions(max_position_embeddings)
        return extended if self.rope_type in ("dynamic", "yarn") else max_position_embeddings

    def max_num_positions(self, max_position_embeddings: int) -> int:
        """The largest length that can be asked for: the trained length times the factor, if that is the larger one.

        For linear and dynamic, the trained length is `max_position_embeddings`, as in vLLM. HF has no limit.
        """
        if self.rope_type == "default":
            return max_position_embeddings
        trained = self.original_max_position_embeddings or max_position_embeddings
        return max(max_position_embeddings, math.ceil(self.factor * trained))

    def to_model_args(self) -> dict[str, Any]:
        """The flat ModelArgs names; absent (None) parameters are left out."""
        args: dict[str, Any] = {"rope_theta": self.theta, "partial_rotary_factor": self.partial_rotary_factor}
        if self.rope_type != "default":
            values = {name: getattr(self, name) for name in _FLAT_NAMES}
            values |= {name: list(values[name]) or None for name in ("short_factor", "long_factor")}
            args |= {_FLAT + name: value for name, value in values.items() if value is not None}
        return args


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def parse_rope(
    raw: Mapping[str, Any], max_position_embeddings: int, defaults: Mapping[str, Any] | None = None
) -> RopeConfig:
    """Read the rotary parameters of a config.json or ModelArgs mapping.

    Spellings that contradict each other, a nested dict per layer type, and an unknown type are ValueErrors.
    """
    keys = ConfigKeys(_merged(raw), "the rope parameters", defaults=defaults)
    rope_type = keys.string("rope_type", "type", default="default")
    if rope_type == "yarn" and keys.numbers("short_factor"):
        rope_type = "longrope"  # an early name
    trained = keys.integer("original_max_position_embeddings", default=max_position_embeddings)
    if rope_type == "dynamic":
        trained = max_position_embeddings
    if rope_type in ("yarn", "longrope"):
        factor = keys.number("factor", default=max_position_embeddings / trained)
    elif rope_type in ("linear", "dynamic", "llama3"):
        factor = keys.number("factor")
    else:
        factor, trained = 1.0, 0
    if rope_type == "linear":
        trained = 0
    config = RopeConfig(
        rope_type=rope_type,
        theta=keys.number("rope_theta", default=10000.0),
        partial_rotary_factor=keys.number("partial_rotary_factor", default=1.0),
        factor=factor,
        original_max_position_embeddings=trained,
        low_freq_factor=keys.number("low_freq_factor", default=1.0),
        high_freq_factor=keys.number("high_freq_factor", default=4.0),
        attention_factor=keys.optional_float("attention_factor"),
        beta_fast=keys.number("beta_fast", default=32.0),
        beta_slow=keys.number("beta_slow", default=1.0),
        mscale=keys.optional_float("mscale"),
        mscale_all_dim=keys.optional_float("mscale_all_dim"),
        truncate=keys.boolean("truncate", default=True),
        short_factor=keys.numbers("short_factor"),
        long_factor=keys.numbers("long_factor"),
    )
    return config


def parse_layer_ropes(
    raw: Mapping[str, Any], max_position_embeddings: int, defaults: Mapping[str, Any] | None = None
) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary parameters of full-attention layers, and of sliding ones where those have their own.

    They do if `rope_parameters` has a dict per layer type, or if there is a `rope_local_base_freq`. In that older HF
    spelling, `rope_scaling` applies to full-attention layers only. For sliding layers, a rope type other than default
    is a ValueError.
    """
    defaults = defaults or {}
    nested = {key: value for key, value in (raw.get("rope_parameters") or {}).items() if isinstance(value, Mapping)}
    local_theta = raw.get("rope_local_base_freq", defaults.get("rope_local_base_freq"))
    if not nested:
        full = parse_rope(raw, max_position_embeddings, defaults)
        return full, None if local_theta is None else RopeConfig(theta=float(local_theta))
    unknown = set(raw["rope_parameters"]) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"rope parameters for layer types {sorted(unknown)} are not supported")
    rest = {key: value for key, value in raw.items() if key != "rope_parameters"}
    _refuse_outer_length(rest, nested.get("full_attention") or {})
    full = parse_rope(rest | {"rope_parameters": nested.get("full_attention")}, max_position_embeddings, defaults)
    local_defaults = dict(defaults) | ({} if local_theta is None else {"rope_theta": local_theta})
    sliding = parse_rope({"rope_parameters": nested.get("sliding_attention")}, max_position_embeddings, local_defaults)
    if sliding.rope_type != "default":
        raise ValueError(f"rope type {sliding.rope_type!r} of sliding_attention layers is not supported")
    return full, sliding


def _refuse_outer_length(raw: Mapping[str, Any], full: Mapping[str, Any]) -> None:
    """Refuse a trained length outside of the parameters per layer type: HF ignores it there, and obeys it elsewhere."""
    name = "original_max_position_embeddings"
    scaled = full.get("rope_type", full.get("type")) in ("llama3", "yarn", "longrope")
    if scaled and raw.get(name) is not None and name not in full:
        raise ValueError(f"{name} {raw[name]} must be in the rope parameters of full_attention, not next to them")


def _merged(raw: Mapping[str, Any]) -> dict[str, Any]:
    """All rotary parameters under their names inside rope_parameters."""
    top = {name: raw.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    top["original_max_position_embeddings"] = raw.get("original_max_position_embeddings")
    flat = {name: raw.get(_FLAT + name) for name in _FLAT_NAMES}
    keys = ConfigKeys(raw)
    spellings = [
        ("the top level", top),
        ("the rope_scaling_* keys", flat),
        ("rope_scaling", keys.mapping("rope_scaling")),
        ("rope_parameters", keys.mapping("rope_parameters")),
    ]
    merged: dict[str, Any] = {}
    found_at: dict[str, str] = {}
    for where, values in spellings:
        for key, given in values.items():
            name = "rope_type" if key == "type" else key
            value = _TYPE_NAMES.get(given, given) if name == "rope_type" and isinstance(given, str) else given
            if isinstance(value, Mapping):
                raise ValueError(f"rope parameters per layer type ({key!r} in {where}) are not supported")
            if value is None:
                continue
            if name in merged and merged[name] != value:
                raise ValueError(
                    f"contradictory keys: {name} is {merged[name]!r} in {found_at[name]} and {value!r} in {where}"
                )
            merged[name], found_at[name] = value, where
    return merged
