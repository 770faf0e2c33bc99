"""The forward context: holds the attention backend of the running forward pass.

Set by runners, read by the attention op only. One value per thread and per asynchronous task; never process-global.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backend import AttentionBackend

_BACKEND: ContextVar[AttentionBackend] = ContextVar("xllm_attention_backend")


@contextmanager
def forward_context(backend: AttentionBackend) -> Iterator[None]:
    """Makes `backend` the current one inside the block; contexts nest, and the outer one is restored on any exit."""
    token = _BACKEND.set(backend)
    try:
        yield
    finally:
        _BACKEND.reset(token)


def current_backend() -> AttentionBackend:
    """The backend of the innermost `forward_context` of this thread or task.

    Raises:
        RuntimeError: outside of any `forward_context`.
    """
    backend = _BACKEND.get(None)
    if backend is None:
        raise RuntimeError(
            "attention ran outside of a forward context: wrap the forward pass in "
            "`with forward_context(backend):`, in the same thread"
        )
    return backend
