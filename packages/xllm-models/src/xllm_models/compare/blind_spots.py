"""Finds mistakes that a comparison cannot show with these weights or this prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from xllm_attention import AttentionSpec

from ..causal_lm import CausalLM
from .routing import Choice
from .trace import Trace

_MOST_NAMES = 4  # of experts or keys in one sentence


def blind_spots(
    model: CausalLM, num_tokens: int, *, trace: Trace | None = None, unread: Sequence[str] = ()
) -> Iterator[str]:
    """One sentence per kind of mistake that a comparison of `num_tokens` tokens of this checkpoint cannot show.

    `trace` is that of our run, `unread` the keys of config.json that nobody has read, with their values.
    """
    weights = dict(model.named_parameters()) | dict(model.named_buffers())
    constant = [name for name, weight in weights.items() if _is_constant(weight)]
    if constant:
        more = f" and {len(constant) - 1} more" if len(constant) > 1 else ""
        yield f"{constant[0]}{more} have the same value everywhere: a port that ignores them may pass"
    attention = [spec for spec in model.layer_specs if isinstance(spec, AttentionSpec)]
    windows = {spec.sliding_window for spec in attention if spec.sliding_window >= num_tokens}
    if windows:
        listed = ", ".join(map(str, sorted(windows)))
        yield f"no query of {num_tokens} tokens leaves a sliding window of {listed}: a longer prompt compares windows"
    if trace is not None:
        yield from _unused_experts(trace.choices)
        if trace.always_zero:
            yield f"always zero during the run: {_listed(trace.always_zero)}: a port that ignores them may pass"
    if unread:
        yield f"keys of config.json that nobody has read: {', '.join(unread)}"


def _is_constant(weight: torch.Tensor) -> bool:
    """Whether all values are the same, as HF initializes them: 0 or 1 of a single one."""
    if weight.numel() < 2:
        return bool(((weight == 0) | (weight == 1)).all()) and bool(weight.numel())
    first = weight.flatten()[0]
    # The first row decides for nearly all matrices.
    return bool((weight[0] == first).all()) and bool((weight == first).all())


def _unused_experts(choices: Mapping[str, Choice]) -> Iterator[str]:
    unused = {name: choice.unused for name, choice in choices.items() if choice.unused}
    if unused:
        count = sum(map(len, unused.values()))
        total = sum(choice.num_experts for choice in choices.values())
        listed = "; ".join(f"{name}: {_listed(list(map(str, experts)))}" for name, experts in unused.items())
        yield f"no token chose {count} of {total} experts ({listed}): a longer prompt compares them"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
