"""Traces one of our models on a prompt, run as a server runs it.

That is a prefill, then the last tokens one by one, over a paged KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from xllm_attention import (
    Attention,
    AttentionBackend,
    BackendLimits,
    StateLayer,
    create_backend,
    forward_context,
)
from xllm_metadata import LayerCache, allocate_caches, build_attention_metadata

from ..causal_lm import CausalLM
from ..layers import LinearBase, RotaryEmbedding
from .routing import ChoiceRecorder
from .trace import LOGITS, Trace, describe, observed

PAGE_SIZE = 16


# (module's name, module, arguments, output) -> (suffix of the entry's name, tensor [T, ...])
Record = Callable[[str, nn.Module, tuple[Any, ...], Any], Iterable[tuple[str, torch.Tensor]]]


def trace_ours(
    model: CausalLM, token_ids: Sequence[int], *, num_decode: int = 2, record: Record | None = None
) -> Trace:
    """Run all of `token_ids`, the last `num_decode` of them one per step, and record every module and the logits.

    `record` chooses the tensors of a module's call; None: those that HF's module of the name would return.
    """
    weighted = (
        name for name, module in model.named_modules() if next(module.parameters(recurse=False), None) is not None
    )
    trace = Trace(token_ids=tuple(token_ids), weighted=tuple(weighted))
    running: list[tuple[str, tuple[Any, ...]]] = []
    recorder = ChoiceRecorder(trace.choices, running)

    def observe(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        recorder.finish_call(name)
        if record is not None:
            for suffix, value in record(name, module, args, output):
                trace.add(name + suffix, value)
            return
        if module is model:  # its result is that of `model.model`
            return
        tensors = dict(_tensors(name, module, args, output, model.weight_map.fused))
        # The attention's queries and keys show the rotary embedding, and the norm after it a layer with state.
        if not tensors and not isinstance(module, RotaryEmbedding | StateLayer):
            trace.mark_unusable(name, describe(output))
        for suffix, value in tensors.items():
            trace.add(name + suffix, value)

    num_tokens = len(token_ids)
    backend, caches = _backend(model, num_tokens)
    ids = torch.tensor(token_ids, device=model.device, dtype=torch.int32)
    positions = torch.arange(num_tokens, device=model.device, dtype=torch.int32)
    prefill = max(num_tokens - num_decode, 1)
    pages = [list(range(-(-num_tokens // PAGE_SIZE)))]
    slots = [0] if backend.runs_state_layers else None
    with torch.no_grad(), observed(model, observe, running), recorder:
        start = 0
        for end in range(prefill, num_tokens + 1):
            metadata = build_attention_metadata(
                [end - start], [end], pages, PAGE_SIZE, device=model.device, state_slots=slots
            )
            backend.plan(metadata)
            with forward_context(backend):
                logits = model.compute_logits(model(ids[start:end], positions[start:end]))
            trace.add(LOGITS, logits)
            start = end
    return replace(trace, always_zero=tuple(_zero_caches(caches)))


def _backend(model: CausalLM, num_tokens: int) -> tuple[AttentionBackend, list[LayerCache]]:
    """The reference backend (PyTorch), bound to a cache of one sequence."""
    limits = BackendLimits(
        device=model.device, dtype=model.dtype, max_num_seqs=1, max_num_tokens=num_tokens, max_model_len=num_tokens
    )
    backend = create_backend("torch", model.layer_specs, limits)
    num_pages = -(-num_tokens // PAGE_SIZE)
    caches = allocate_caches(model.cache_specs, num_pages=num_pages, page_size=PAGE_SIZE, device=model.device)
    backend.bind_kv_caches(caches)
    return backend, caches


def _zero_caches(caches: Sequence[LayerCache]) -> Iterator[str]:
    for layer, cache in enumerate(caches):
        yield from (f"the {slot} cache of layer {layer}" for slot, tensor in cache.items() if not bool(tensor.any()))


def _tensors(
    name: str, module: nn.Module, args: tuple[Any, ...], output: Any, fused: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The comparable tensors of a call: (suffix of the entry's name, tensor [T, ...])."""
    if isinstance(module, Attention):
        # Queries and keys show the effect of their norms and of the rotary embedding.
        yield from zip((".q", ".k"), args[:2], strict=True)
        yield "", output
    elif isinstance(module, RotaryEmbedding | StateLayer):
        return
    elif isinstance(output, torch.Tensor):
        yield "", output
    elif isinstance(output, tuple) and output and all(isinstance(one, torch.Tensor) for one in output):
        if isinstance(module, LinearBase) or name.rsplit(".", 1)[-1] in fused:
            yield "", torch.cat([one.flatten(1) for one in output], dim=1)  # a fused projection
        elif len(output) == 2 and output[0].ndim == 2 and output[0].shape == output[1].shape:
            # A decoder layer (its name is an index) returns hidden and residual, whose sum HF returns. A norm returns
            # the residual too, but HF's norm does not.
            yield "", output[0] + output[1] if name.rsplit(".", 1)[-1].isdecimal() else output[0]
        else:
            yield "", output[0]  # as of HF's modules
