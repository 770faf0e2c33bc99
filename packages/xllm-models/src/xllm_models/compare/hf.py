"""Traces HF transformers' model on the same prompt. No other module imports transformers, but for its tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .trace import LOGITS, Trace, observed


def trace_hf(directory: Path, token_ids: Sequence[int], *, dtype: torch.dtype, device: torch.device | str) -> Trace:
    """One forward of HF's model, with its eager attention, over all of `token_ids`.

    ModuleNotFoundError if transformers is not installed.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    # Without images, a model of text and images runs its text model only.
    text_only = type(AutoConfig.from_pretrained(directory)) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto_class = AutoModelForCausalLM if text_only else AutoModelForImageTextToText
    model: nn.Module = auto_class.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    model.to(device)
    trace = Trace(token_ids=tuple(token_ids))

    def observe(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
        if name and isinstance(value, torch.Tensor):
            trace.add(name, _rows(value, len(token_ids)))

    ids = torch.tensor([list(token_ids)], device=device)
    with torch.no_grad(), observed(model, observe), _attention_observed(model, trace):
        output = model(input_ids=ids, use_cache=False)
    trace.add(LOGITS, output.logits[0])
    return trace


def _rows(value: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[1, T, ...] or [T, ...] as [T, ...]."""
    return value[0] if value.shape[0] == 1 and (num_tokens > 1 or value.ndim > 2) else value


@contextmanager
def _attention_observed(model: nn.Module, trace: Trace) -> Iterator[None]:
    """Also record each attention's queries and keys (after norms and rotary embedding) and its result.

    Hooks do not see HF's rotary embedding, which is a function. HF looks up its attention function by name in the
    family's Python module at each call, so a wrapper set there sees its inputs and its result. A model of several
    (vision, text) has modules of more than one family.
    """
    names = {id(module): f"{name}.attn" for name, module in model.named_modules()}
    families: dict[str, Any] = {
        type(module).__module__: sys.modules[type(module).__module__] for module in model.modules()
    }
    originals = {
        name: family.eager_attention_forward
        for name, family in families.items()
        if hasattr(family, "eager_attention_forward")
    }

    def observing(attend: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            out = attend(module, query, key, *args, **kwargs)
            name = names[id(module)]
            trace.add(f"{name}.q", query[0].transpose(0, 1))  # from [1, H, T, D]
            trace.add(f"{name}.k", key[0].transpose(0, 1))
            trace.add(name, out[0][0])  # from [1, T, H, D]
            return out

        return call

    for name, original in originals.items():
        families[name].eager_attention_forward = observing(original)
    try:
        yield
    finally:
        for name, original in originals.items():
            families[name].eager_attention_forward = original
