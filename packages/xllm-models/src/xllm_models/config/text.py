"""Finds the text model's configuration in a config.json of several models (vision, audio, text)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .keys import ConfigKeys

TEXT_MODEL_TYPE = "text_model_type"  # the nested mapping's model_type, in the flat one

_NESTED = ("text_config", "llm_config", "language_config")

# Keys that describe the checkpoint, not one of its models: the outer value counts, else the nested one.
_OF_CHECKPOINT = (
    "architectures",
    "model_type",
    "tie_word_embeddings",
    "quantization_config",
    "compression_config",
    "bos_token_id",
    "eos_token_id",
)


def text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the text model, as one flat mapping; an equal copy where nothing is nested.

    The nested mapping is `text_config`, `llm_config` or `language_config`. HF keeps some keys outside of it: the
    architecture, the model type, tied embeddings, quantization, special tokens and the dtype. ValueError for a nested
    value that is not a mapping, and for two nested mappings that differ.
    """
    nested = ConfigKeys(raw).mapping(*_NESTED)
    if not nested:
        return {key: value for key, value in raw.items() if key not in _NESTED}
    text = dict(nested) | {key: raw[key] for key in _OF_CHECKPOINT if raw.get(key) is not None}
    dtypes = (mapping.get(name) for mapping in (raw, nested) for name in ("dtype", "torch_dtype"))
    text["dtype"] = next((dtype for dtype in dtypes if dtype is not None), None)
    text.pop("torch_dtype", None)
    text[TEXT_MODEL_TYPE] = nested.get("model_type")
    return text


def without_mrope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with plain rotary parameters instead of Qwen-VL's mrope.

    mrope has three positions per token, and takes each frequency's angle from one of them. Those of a text token are
    equal, so for text it is the rotary embedding of one position.
    """
    changed = dict(raw)
    for name in ("rope_parameters", "rope_scaling"):
        given = ConfigKeys(raw).mapping(name)
        rope = {key: value for key, value in given.items() if key not in ("mrope_section", "mrope_interleaved")}
        changed[name] = {key: "default" if value == "mrope" else value for key, value in rope.items()} or None
    return changed
