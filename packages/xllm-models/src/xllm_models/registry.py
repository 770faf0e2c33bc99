"""The registry: maps an architecture or model type to its model class.

A class is built in, an entry point of the group `xllm.models`, or registered by a script. Its module is imported at the
first use.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from .causal_lm import CausalLM

ENTRY_POINT_GROUP = "xllm.models"

_BUILT_IN = {
    name: f"xllm_models.models.{module}:{architecture}"
    for module, architecture, model_type in (
        ("gemma3", "Gemma3ForCausalLM", "gemma3_text"),
        ("llama", "LlamaForCausalLM", "llama"),
        ("mistral", "MistralForCausalLM", "mistral"),
        ("phi3", "Phi3ForCausalLM", "phi3"),
        ("qwen2", "Qwen2ForCausalLM", "qwen2"),
        ("qwen3", "Qwen3ForCausalLM", "qwen3"),
        ("qwen3_moe", "Qwen3MoeForCausalLM", "qwen3_moe"),
    )
    for name in (architecture, model_type)
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


def _checked(name: str, model_class: object) -> type[CausalLM]:
    if not (isinstance(model_class, type) and issubclass(model_class, CausalLM)):
        raise ValueError(f"model {name!r} is {model_class!r}, which is not a CausalLM class")
    return model_class
