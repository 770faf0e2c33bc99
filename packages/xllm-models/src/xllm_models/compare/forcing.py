"""Makes HF's routers choose the experts that ours chose, so that all later tokens stay comparable.

T tokens, E experts, k experts per token, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..forwards import Forward
from .routing import Choice, Flip, differing_rows, judged
from .trace import Trace

_ULPS = 2.0  # units of the dtype: logits are rounded once in each model, and sums in another order differ

_Calls = list[tuple[torch.Tensor, torch.Tensor]]  # (scores, indices) of each call of `torch.topk`


@contextmanager
def forcing(model: nn.Module, choices: Mapping[str, Choice], trace: Trace) -> Iterator[None]:
    """Within the context, HF's routers choose the experts of `choices`, by the router's name.

    `trace` is the trace of the run. It gets the choices as they were used, and the flips.
    """
    modules: list[Any] = []
    try:
        for name, choice in choices.items():
            module: Any = model.get_submodule(name)
            module.forward = _forced(name, module.forward, choice, trace)
            modules.append(module)
        yield
    finally:
        for module in modules:
            del module.forward


def _forced(name: str, forward: Forward, ours: Choice, trace: Trace) -> Forward:
    def call(*args: Any, **kwargs: Any) -> Any:
        before = set(trace.entries)
        with _TopK() as free:
            output = forward(*args, **kwargs)
        scores, theirs = free.calls[-1]
        experts = ours.experts.to(theirs.device)
        rows = differing_rows(experts, theirs)
        if rows:
            again = _with_our_inputs(forward, args, kwargs, ours)
            trace.flips.extend(_flips(name, rows, experts, free.calls, again, _unit(args, kwargs, output)))
            theirs = theirs.clone()
            theirs[rows] = experts[rows]
            answers = {len(free.calls) - 1: theirs} | dict(_groups(free.calls[:-1], theirs, rows, scores))
            for entry in set(trace.entries) - before:  # the router's own modules run again
                del trace.entries[entry]
            with _TopK(answers):
                output = forward(*args, **kwargs)
        trace.choices[name] = Choice(experts=theirs.cpu(), num_experts=scores.shape[-1], scores=scores.float().cpu())
        return output

    return call


class _TopK(TorchFunctionMode):
    """Records the calls of `torch.topk`, and answers those of `answers` (by number of the call) with given indices."""

    def __init__(self, answers: Mapping[int, torch.Tensor] | None = None) -> None:
        super().__init__()
        self._answers = answers or {}
        self.calls: _Calls = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return output
        scores = args[0] if args else (kwargs or {})["input"]
        indices = self._answers.get(len(self.calls), output[1])
        self.calls.append((scores, output[1]))
        # Without an answer the values stay as they are, bit for bit.
        return output if indices is output[1] else torch.return_types.topk((scores.gather(-1, indices), indices))


def _flips(
    name: str,
    rows: Sequence[int],
    experts: torch.Tensor,
    calls: _Calls,
    again: _Calls,
    unit: torch.Tensor,
) -> Iterator[Flip]:
    """The flips of `rows`, judged by the scores of experts, or of groups where a token goes to another group."""
    scores, theirs = calls[-1]
    found = judged(name, rows, experts, theirs, scores, _rounding(scores, again[-1][0] if again else None, unit))
    for flip in found:
        for number, (of_groups, groups) in enumerate(calls[:-1]):
            if not _chooses_groups(of_groups, scores):
                continue
            ours = dict(_groups(calls[:-1], experts, [flip.token], scores))[number]
            if not differing_rows(ours[[flip.token]], groups[[flip.token]]):
                continue
            # The experts of other groups have a fixed score (-inf or 0), so the groups' scores have the margin.
            errors = _rounding(of_groups, again[number][0] if again else None, unit)
            for of_group in judged(name, [flip.token], ours, groups, of_groups, errors):
                flip = replace(flip, margin=of_group.margin, rounding=of_group.rounding)
        yield flip


def _unit(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> torch.Tensor:
    """[T, 1]: the rounding error of each token's logits, relative to scores of at most 1."""
    hidden = _hidden(args, kwargs)
    logits = output[0] if isinstance(output, tuple) else output
    known = isinstance(logits, torch.Tensor) and logits.is_floating_point() and logits.ndim == 2
    largest = logits.float().abs().amax(-1, keepdim=True) if known else torch.ones(1, 1, device=hidden.device)
    return _ULPS * torch.finfo(hidden.dtype).eps * largest.clamp(min=1.0)


def _rounding(scores: torch.Tensor, again: torch.Tensor | None, unit: torch.Tensor) -> torch.Tensor:
    """[T, E]: how far off each score may be in a right model.

    That is how much it changes when HF's router gets our hidden states, plus the rounding errors of the router itself.
    """
    finite = scores.float().masked_fill(scores.isinf(), 0.0)
    own = unit * finite.abs().amax(-1, keepdim=True)
    change = torch.zeros_like(finite) if again is None else (again.float() - scores.float()).abs()
    return own + change.nan_to_num(nan=0.0, posinf=torch.inf)  # -inf in both is no change


def _with_our_inputs(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], ours: Choice) -> _Calls:
    """The calls of `torch.topk` in HF's router on our hidden states; empty where those are not known."""
    hidden = _hidden(args, kwargs)
    if ours.inputs is None or ours.inputs.numel() != hidden.numel():
        return []
    replaced = ours.inputs.to(hidden).view(hidden.shape)
    with _TopK() as again:
        if args:
            forward(replaced, *args[1:], **kwargs)
        else:
            forward(**{name: replaced if value is hidden else value for name, value in kwargs.items()})
    calls: _Calls = again.calls
    return calls


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    hidden: torch.Tensor = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
    return hidden


def _chooses_groups(scores: torch.Tensor, of_experts: torch.Tensor) -> bool:
    num_groups, num_experts = scores.shape[-1], of_experts.shape[-1]
    return scores.ndim == 2 and num_groups < num_experts and num_experts % num_groups == 0


def _groups(
    calls: _Calls, experts: torch.Tensor, rows: Sequence[int], of_experts: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor]]:
    """(number of the call, groups [T, .]) of each choice of groups: in `rows` those of the experts, then its own."""
    for number, (scores, groups) in enumerate(calls):
        if _chooses_groups(scores, of_experts):
            size = of_experts.shape[-1] // scores.shape[-1]
            changed = groups.clone()
            for row in rows:
                wanted = dict.fromkeys((experts[row] // size).tolist() + groups[row].tolist())
                changed[row] = torch.tensor(list(wanted)[: groups.shape[-1]], device=groups.device)
            yield number, changed
