"""The registry: maps an architecture or model type to its model class.

A class is built in, an entry point of the group `xllm.models`, or registered by a script. Its module is imported at the
first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from .causal_lm import CausalLM
from .config import ConfigKeys, ModelConfig, read_config

ENTRY_POINT_GROUP = "xllm.models"

_BUILT_IN = {
    name: f"xllm_models.models.{module}:{class_name}"
    for module, class_name, *names in (
        # Of a checkpoint with a vision tower, the text model is served.
        ("gemma3", "Gemma3ForCausalLM", "gemma3_text", "Gemma3ForConditionalGeneration", "gemma3"),
        ("deepseek", "DeepseekV2ForCausalLM", "deepseek_v2"),
        ("deepseek", "DeepseekV3ForCausalLM", "deepseek_v3"),
        ("glm4", "Glm4ForCausalLM", "glm4"),
        ("glm4_moe", "Glm4MoeForCausalLM", "glm4_moe"),
        ("gpt_oss", "GptOssForCausalLM", "gpt_oss"),
        ("llama", "LlamaForCausalLM", "llama"),
        ("mistral", "MistralForCausalLM", "mistral", "Mistral3ForConditionalGeneration", "mistral3"),
        ("mistral", "MistralForCausalLM", "MinistralForCausalLM", "ministral"),
        ("mixtral", "MixtralForCausalLM", "mixtral"),
        ("olmo2", "Olmo2ForCausalLM", "olmo2"),
        ("phi3", "Phi3ForCausalLM", "phi3"),
        ("qwen2", "Qwen2ForCausalLM", "qwen2"),
        ("qwen2", "Qwen2VLForConditionalGeneration", "qwen2_vl"),
        ("qwen2", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"),
        ("qwen3", "Qwen3ForCausalLM", "qwen3"),
        ("qwen3", "Qwen3VLForConditionalGeneration", "qwen3_vl"),
        ("qwen3_moe", "Qwen3MoeForCausalLM", "qwen3_moe"),
        ("qwen3_next", "Qwen3NextForCausalLM", "qwen3_next"),
        ("qwen3_5", "Qwen3_5ForCausalLM", "qwen3_5_text", "Qwen3_5ForConditionalGeneration", "qwen3_5"),
        ("qwen3_5", "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
    )
    for name in (class_name, *names)
}

_registered: dict[str, type[CausalLM]] = {}


def register_model(name: str, model_class: type[CausalLM]) -> None:
    """Map the architecture or model type `name` to `model_class`, without an entry point.

    ValueError for a name of another class, and for a `model_class` that is not a CausalLM class.
    """
    _checked(name, model_class)
    if _registered.get(name, model_class) is not model_class or name in _BUILT_IN:
        raise ValueError(f"model {name!r} is registered already")
    _registered[name] = model_class


def supported_models() -> list[str]:
    """Every architecture and model type that `get_model_class` knows, sorted."""
    return sorted({*_BUILT_IN, *_registered, *entry_points(group=ENTRY_POINT_GROUP).names})


def get_model_class(name: str) -> type[CausalLM]:
    """The class for an HF architecture (LlamaForCausalLM) or model type (llama).

    ValueError for an unknown name (it lists the known ones), a name that several installed packages claim, and an entry
    point that is not a CausalLM class.
    """
    if name in _registered:
        return _registered[name]
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        return _checked(name, getattr(import_module(module), attribute))
    claims = entry_points(group=ENTRY_POINT_GROUP, name=name)
    if len(claims) > 1:
        raise ValueError(f"model {name!r} is claimed by {sorted(claim.value for claim in claims)}")
    for claim in claims:
        return _checked(name, claim.load())
    raise ValueError(
        f"unsupported architecture {name!r}; supported: {', '.join(supported_models())}. Other families need an "
        f"entry point of the group {ENTRY_POINT_GROUP}, or register_model"
    )


def architecture(raw: Mapping[str, Any], where: str = "config") -> str:
    """The name under which a configuration's model class is found: the first of `architectures`, or `model_type`.

    ValueError if it has neither.
    """
    keys = ConfigKeys(raw, where)
    architectures = keys.strings("architectures")
    return architectures[0] if architectures else keys.string("model_type")


def read_model_config(path: str | Path) -> tuple[type[CausalLM], ModelConfig]:
    """The model class of a checkpoint directory, and the configuration as that class parses it.

    Errors are those of `read_config`, `get_model_class` and the class's `parse_config`.
    """
    directory = Path(path)
    raw = read_config(directory)
    model_class = get_model_class(architecture(raw, str(directory / "config.json")))
    return model_class, model_class.parse_config(raw)


def _checked(name: str, model_class: object) -> type[CausalLM]:
    if not (isinstance(model_class, type) and issubclass(model_class, CausalLM)):
        raise ValueError(f"model {name!r} is {model_class!r}, which is not a CausalLM class")
    return model_class
