"""Records the outputs of a model's modules during a run.

Owns the record. Which of a module's tensors are recorded is the caller's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..forwards import Forward, wrapped_forwards

LOGITS = "logits"  # the entry of the model's logits, after those of its modules

Observer = Callable[[str, nn.Module, tuple[Any, ...], Any], None]  # (name, module, arguments, output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Entries in the order in which they were first seen; each [T, features] fp32 on the CPU."""

    token_ids: tuple[int, ...]
    entries: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, value: torch.Tensor) -> None:
        """Append rows to an entry."""
        rows = value.detach().flatten(1).float().cpu()
        self.entries[name] = torch.cat((self.entries[name], rows)) if name in self.entries else rows.clone()


def observed(model: nn.Module, observe: Observer) -> AbstractContextManager[None]:
    """Within the context, `observe` gets every call of every module's forward."""

    def wrap(name: str, module: nn.Module, forward: Forward) -> Forward:
        def call(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            observe(name, module, args, output)
            return output

        return call

    return wrapped_forwards(model, wrap)
