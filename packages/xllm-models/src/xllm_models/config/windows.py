"""Parses the sliding windows of a model: their size, and the layers that have one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .keys import ConfigKeys

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
LAYER_TYPES = (FULL, SLIDING)

_OLD_NAMES = {"attention": FULL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The values of the fields of the same names in `ModelConfig`."""

    sliding_window: int
    max_window_layers: int
    layer_types: tuple[str, ...]


def parse_windows(keys: ConfigKeys, num_layers: int, allowed: Collection[str] = LAYER_TYPES) -> Windows:
    """The windows; `layer_types` counts before `sliding_window_pattern`, and that before `max_window_layers`, as in HF.

    ValueError for a layer type outside of `allowed`, another number of layer types than layers, layer types that name
    sliding layers without a window, and a window or a pattern below 1.
    """
    layer_types = _layer_types(keys, num_layers, allowed)
    window = _sliding_window(keys)
    if SLIDING in layer_types and not window:
        window_value = None if keys.is_null("sliding_window") else keys.find("sliding_window")
        raise ValueError(
            f"contradictory keys in config: layer_types={list(layer_types)} names layers with {SLIDING}, but there is "
            f"no window: use_sliding_window={keys.find('use_sliding_window')}, sliding_window={window_value}. Allowed: "
            f"layer_types of {FULL} only, or use_sliding_window=True (if the family has the key) and a sliding_window "
            "of at least 1"
        )
    return Windows(
        sliding_window=window,
        max_window_layers=keys.integer("max_window_layers", default=0),
        layer_types=layer_types,
    )


def check_layer_types(raw: Mapping[str, Any], num_layers: int, allowed: Collection[str] = LAYER_TYPES) -> None:
    """The checks of `layer_types` alone, also for a family that does not read the key."""
    _listed_types(ConfigKeys(raw), num_layers, allowed)


def _sliding_window(keys: ConfigKeys) -> int:
    """0 without windows: the key is absent without a default, or null, or use_sliding_window is false."""
    given = keys.given("sliding_window")
    if not keys.boolean("use_sliding_window", default=given) or (given and keys.is_null("sliding_window")):
        return 0
    window = keys.integer("sliding_window")
    if window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {window}")
    return window


def _listed_types(keys: ConfigKeys, num_layers: int, allowed: Collection[str]) -> tuple[str, ...]:
    layer_types = tuple(_OLD_NAMES.get(name, name) for name in keys.strings("layer_types"))
    if layer_types and len(layer_types) != num_layers:
        raise ValueError(f"layer_types has {len(layer_types)} entries for {num_layers} layers")
    for layer_id, name in enumerate(layer_types):
        if name not in allowed:
            raise ValueError(
                f"layer_types has {name!r} for layer {layer_id}, which this family does not have; allowed: "
                f"{', '.join(allowed)}"
            )
    return layer_types


def _layer_types(keys: ConfigKeys, num_layers: int, allowed: Collection[str]) -> tuple[str, ...]:
    """As given, or from sliding_window_pattern n: each n-th layer has full attention, the others a sliding window."""
    layer_types = _listed_types(keys, num_layers, allowed)
    pattern = keys.optional_int("sliding_window_pattern")
    if layer_types or pattern is None:
        return layer_types
    if pattern < 1:
        raise ValueError(f"sliding_window_pattern must be at least 1, got {pattern}")
    return tuple(SLIDING if (layer_id + 1) % pattern else FULL for layer_id in range(num_layers))


def with_linear_layers(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with layer_types: where it has none, each `full_attention_interval`-th layer (4) has full attention."""
    if raw.get("layer_types") is not None or raw.get("num_hidden_layers") is None:
        return dict(raw)
    interval = raw.get("full_attention_interval") or 4
    layers = range(1, raw["num_hidden_layers"] + 1)
    return {**raw, "layer_types": [LINEAR if number % interval else FULL for number in layers]}
