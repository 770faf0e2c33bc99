"""Traces HF transformers' model on the same prompt. No other module imports transformers, but for its tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .forcing import forcing
from .routing import Choice, ChoiceRecorder, match
from .trace import LOGITS, Trace, describe, observed


def trace_hf(
    directory: Path,
    token_ids: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    choices: Mapping[str, Choice] | None = None,
    rename: Callable[[str], str] = str,
) -> Trace:
    """One forward of HF's model, with its eager attention, over all of `token_ids`.

    `choices` are those of the model to compare with. HF's routers are made to choose the same experts; the trace's
    `flips` are the tokens for which they would not have. `rename` maps HF's module names to the names in `choices`.
    ModuleNotFoundError if transformers is not installed.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    # Without images, a model of text and images runs its text model only.
    text_only = type(AutoConfig.from_pretrained(directory)) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto_class = AutoModelForCausalLM if text_only else AutoModelForImageTextToText
    model: nn.Module = auto_class.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    model.to(device)
    ids = torch.tensor([list(token_ids)], device=device)
    trace = _traced(model, ids)
    if choices and trace.choices:
        # The first run shows which modules are routers.
        routers = {rename(name): name for name in trace.choices}
        found = match(choices, {name: trace.choices[routers[name]] for name in routers})
        trace = _traced(model, ids, {routers[name]: choices[ours] for name, ours in found.items()}, before=trace)
    return trace.renamed(rename)


def _traced(
    model: nn.Module, ids: torch.Tensor, choices: Mapping[str, Choice] | None = None, before: Trace | None = None
) -> Trace:
    """One run over ids [1, T]. With `choices`, by router, it takes those; `before` is a run without them."""
    weighted = (
        name for name, module in model.named_modules() if next(module.parameters(recurse=False), None) is not None
    )
    trace = Trace(
        token_ids=tuple(ids[0].tolist()),
        weighted=tuple(weighted),
        choices={} if before is None else dict(before.choices),
    )
    running: list[tuple[str, tuple[Any, ...]]] = []
    recorder = ChoiceRecorder({} if choices else trace.choices, running)

    def observe(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        recorder.finish_call(name)
        if name:
            _add(trace, name, output)

    with (
        torch.no_grad(),
        forcing(model, choices or {}, trace),
        observed(model, observe, running),
        _attention_observed(model, trace),
        recorder,
    ):
        output = model(input_ids=ids, use_cache=False)
    trace.add(LOGITS, output.logits[0])
    return trace


def _add(trace: Trace, name: str, output: Any) -> None:
    """Record the hidden states that a module returns; of a tuple also each tensor, as `name[0]`, `name[1]`, ..."""
    value = output
    if isinstance(output, (tuple, list)):
        value = output[0] if output else None
        for index, part in enumerate(output):
            if isinstance(part, torch.Tensor):
                _add(trace, f"{name}[{index}]", part)
    elif not isinstance(output, torch.Tensor):
        value = getattr(output, "last_hidden_state", None)
    rows = _rows(value, len(trace.token_ids)) if isinstance(value, torch.Tensor) else None
    if rows is None:
        trace.mark_unusable(name, describe(output))
    else:
        trace.add(name, rows)


def _rows(value: torch.Tensor, num_tokens: int) -> torch.Tensor | None:
    """[1, T, ...], [T, ...], [1, H, T, ...] or [T * H, D] as [T, ...]; None where no or several dimensions may be T."""
    if value.ndim > 1 and value.shape[0] == 1 and (num_tokens > 1 or value.ndim > 2):
        value = value[0]
    if value.ndim < 3:
        # A norm of heads may get them as rows.
        fits = value.ndim and value.shape[0] and value.shape[0] % num_tokens == 0
        return value.reshape(num_tokens, *([-1] if value.shape[0] > num_tokens else value.shape[1:])) if fits else None
    tokens = [dim for dim in range(2) if value.shape[dim] == num_tokens]
    return value.transpose(0, tokens[0]) if len(tokens) == 1 else None


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
