"""Wraps the forward of every module of a model for a while: to record outputs, or the order of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn

Forward = Callable[..., Any]


@contextmanager
def wrapped_forwards(model: nn.Module, wrap: Callable[[str, nn.Module, Forward], Forward]) -> Iterator[None]:
    """Within the context, each module's forward is `wrap(full name, module, forward)`.

    It is set on the instance: PyTorch's hooks would miss code that calls `forward` directly.
    """
    wrapped: list[tuple[nn.Module, Any]] = []
    try:
        for name, module in model.named_modules():
            before = vars(module).get("forward")
            forward = wraps(module.forward)(wrap(name, module, module.forward))
            setattr(module, "forward", forward)  # noqa: B010 - mypy knows it as a method
            wrapped.append((module, before))
        yield
    finally:
        for module, before in wrapped:
            if before is None:
                delattr(module, "forward")
            else:
                setattr(module, "forward", before)  # noqa: B010
