"""What a run of a model gave, by module.

Owns the record and the hooks. Which of a module's tensors count is the caller's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import nn

LOGITS = "logits"  # the entry of what the model gives, behind its modules

Observer = Callable[[str, nn.Module, tuple[Any, ...], Any], None]  # (name, module, arguments, output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Entries in the order in which they were first seen; each [T, features] fp32 on the CPU."""

    token_ids: tuple[int, ...]
    entries: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, value: torch.Tensor) -> None:
        """Record rows of an entry behind those that it has."""
        rows = value.detach().flatten(1).float().cpu()
        self.entries[name] = torch.cat((self.entries[name], rows)) if name in self.entries else rows.clone()


@contextmanager
def observed(model: nn.Module, observe: Observer) -> Iterator[None]:
    """Within it, every call of every module's forward is observed, also where code calls `forward` directly.

    PyTorch's own hooks would miss those, so `forward` itself is wrapped, on the instance.
    """
    wrapped: list[tuple[nn.Module, Any]] = []
    try:
        for name, module in model.named_modules():
            before = vars(module).get("forward")
            setattr(module, "forward", _observing(name, module, observe))  # noqa: B010 - mypy knows it as a method
            wrapped.append((module, before))
        yield
    finally:
        for module, before in wrapped:
            if before is None:
                delattr(module, "forward")
            else:
                setattr(module, "forward", before)  # noqa: B010


def _observing(name: str, module: nn.Module, observe: Observer) -> Callable[..., Any]:
    forward = module.forward

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        observe(name, module, args, output)
        return output

    return call
