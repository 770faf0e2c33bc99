"""Leaves out the configuration keys that other families have and transformers' class of this family does not read.

transformers ignores such a key, so it must have no effect here either. Where it would have one, it is reported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from .rope import RopeConfig
from .windows import SLIDING

QWEN_WINDOW_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
GEMMA_KEYS = (
    "sliding_window_pattern",
    "rope_local_base_freq",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
    "hidden_activation",
)
ROUTED_EXPERT_KEYS = (
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
)
EXPERT_KEYS = ("num_experts", *ROUTED_EXPERT_KEYS, "decoder_sparse_step", "mlp_only_layers")

# Keys that some families read and others do not.
OPTIONAL_KEYS = frozenset(
    (*QWEN_WINDOW_KEYS, *GEMMA_KEYS, *EXPERT_KEYS, "partial_rotary_factor", "attention_bias", "mlp_bias", "hidden_act")
)

_TOP_LEVEL = OPTIONAL_KEYS - {"partial_rotary_factor"}
_ACTIVATIONS = ("hidden_act", "hidden_activation")
_WINDOW_KEYS = ("sliding_window", "max_window_layers", "layer_types", "sliding_window_pattern")


def split_unread(raw: Mapping[str, Any], reads: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`raw` without the optional keys outside of `reads`, and those of them whose values suggest an effect.

    `without_partial_rotary` handles partial_rotary_factor, which may be in a nested mapping. ModelArgs (`n_layers`)
    have a value for each key, so they are returned as they are.
    """
    if raw.get("n_layers") is not None:
        return dict(raw), {}
    unread = {key: value for key, value in raw.items() if key in _TOP_LEVEL and key not in reads}
    kept = {key: value for key, value in raw.items() if key not in unread}
    return kept, {key: value for key, value in unread.items() if _suggests_effect(key, value, raw)}


def _suggests_effect(key: str, value: Any, raw: Mapping[str, Any]) -> bool:
    if key == "use_sliding_window":  # false too, where sliding_window alone is read
        return raw.get("sliding_window") is not None
    if key in _WINDOW_KEYS:
        windows = raw.get("sliding_window") is not None and raw.get("use_sliding_window") is not False
        return windows and value is not None and (key != "layer_types" or SLIDING in value)
    if key in _ACTIVATIONS:
        return value is not None and any(value != raw.get(other) for other in _ACTIVATIONS)
    return bool(value)


def without_partial_rotary(rope: RopeConfig, unread: dict[str, Any]) -> RopeConfig:
    """The rotary embedding of a family that rotates whole heads. The factor that it ignores is added to `unread`.

    transformers ignores the factor with the rope type default only: with all others its model fails, as here with a
    ValueError.
    """
    if rope.partial_rotary_factor == 1.0:
        return rope
    if rope.rope_type != "default":
        raise ValueError(
            f"partial_rotary_factor {rope.partial_rotary_factor} is not supported by this family with rope type "
            f"{rope.rope_type!r}; it must be 1.0 or absent"
        )
    unread["partial_rotary_factor"] = rope.partial_rotary_factor
    return replace(rope, partial_rotary_factor=1.0)
