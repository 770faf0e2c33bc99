"""Records what a model computes during a run: its modules' outputs, and the experts that its routers choose.

Owns the record. Which of a module's tensors are recorded is the caller's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..forwards import Forward, wrapped_forwards
from .routing import Choice, Flip

LOGITS = "logits"  # the entry of the model's logits, after those of its modules

Observer = Callable[[str, nn.Module, tuple[Any, ...], Any], None]  # (name, module, arguments, output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Entries in the order in which they were first seen; each [T, features] fp32 on the CPU."""

    token_ids: tuple[int, ...]
    entries: dict[str, torch.Tensor] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)  # by the module that chose, in order of execution
    flips: list[Flip] = field(default_factory=list)  # of a reference that was made to choose as we did
    unusable: dict[str, str] = field(default_factory=dict)  # a module without an entry -> what it returned
    weighted: tuple[str, ...] = ()  # the modules that own parameters
    always_zero: tuple[str, ...] = ()  # state that was zero after the run

    def add(self, name: str, value: torch.Tensor) -> None:
        """Append rows to an entry. Rows of another width make the entry unusable."""
        if name in self.unusable:
            return
        if value.is_complex():  # the rotations of transformers' DeepSeek-V2
            value = torch.view_as_real(value)
        if not value.ndim:
            self.mark_unusable(name, "a scalar")
            return
        rows = value.detach().flatten(1).float().cpu() if value.ndim > 1 else value.detach()[:, None].float().cpu()
        before = self.entries.get(name)
        if before is not None and before.shape[1] != rows.shape[1]:
            self.mark_unusable(name, f"rows of {before.shape[1]} and of {rows.shape[1]} values")
            return
        self.entries[name] = rows.clone() if before is None else torch.cat((before, rows))

    def renamed(self, rename: Callable[[str], str]) -> Trace:
        """The same trace with other names for its modules."""
        return Trace(
            token_ids=self.token_ids,
            entries={rename(name): value for name, value in self.entries.items()},
            choices={rename(name): choice for name, choice in self.choices.items()},
            flips=[replace(flip, router=rename(flip.router)) for flip in self.flips],
            unusable={rename(name): returned for name, returned in self.unusable.items()},
            weighted=tuple(map(rename, self.weighted)),
            always_zero=self.always_zero,
        )

    def mark_unusable(self, name: str, returned: str) -> None:
        """Drop an entry that cannot be compared, and keep a description of what the module returned."""
        self.entries.pop(name, None)
        self.unusable[name] = returned


def observed(
    model: nn.Module, observe: Observer, running: list[tuple[str, tuple[Any, ...]]] | None = None
) -> AbstractContextManager[None]:
    """Within the context, `observe` gets every call of every module's forward.

    `running` holds the names and arguments of the calls in progress, the innermost last.
    """
    stack = [] if running is None else running

    def wrap(name: str, module: nn.Module, forward: Forward) -> Forward:
        def call(*args: Any, **kwargs: Any) -> Any:
            stack.append((name, args))
            try:
                output = forward(*args, **kwargs)
            finally:
                stack.pop()
            observe(name, module, args, output)
            return output

        return call

    return wrapped_forwards(model, wrap)


def describe(value: object) -> str:
    """What a module returned: `Tensor[4, 8]`, `(Tensor[4, 8], None)`, `dict`."""
    if isinstance(value, torch.Tensor):
        return f"Tensor{list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(describe, value))})"
    return "None" if value is None else type(value).__name__
