"""Intercepts launches of interpreted Triton kernels, which do not pass through PyTorch's dispatcher."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Launch = Callable[..., Any]
"""(*arguments, grid, ...) of one kernel; launches it."""


@contextmanager
def watched_launches(on_launch: Callable[[Launch, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Hands every launch inside the block to `on_launch` instead, as (launch, args, kwargs).

    On a device a launch is part of the stream that a capture records. Triton's interpreter runs the kernel in Python.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        yield
        return
    kernel_type: Any = interpreter.InterpretedFunction
    original = kernel_type.run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        return on_launch(lambda *a, **k: original(kernel, *a, **k), args, kwargs)

    kernel_type.run = run
    try:
        yield
    finally:
        kernel_type.run = original
