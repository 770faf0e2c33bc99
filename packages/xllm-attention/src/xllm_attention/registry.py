"""Which backends exist, and how one is made by name.

Owns the table of built-in backends and the reading of the entry-point group `xllm.attention_backends`, whose values
name subclasses of `AttentionBackend`. Nothing is imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

import torch

from .backend import AttentionBackend
from .spec import AttentionSpec

ENTRY_POINT_GROUP = "xllm.attention_backends"

_BUILT_IN = (
    EntryPoint("torch", "xllm_attention.backends.torch_backend:TorchBackend", ENTRY_POINT_GROUP),
    EntryPoint("triton", "xllm_attention.backends.triton_backend:TritonBackend", ENTRY_POINT_GROUP),
)


def create_backend(
    name: str,
    specs: Sequence[AttentionSpec],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    max_num_seqs: int,
    max_num_tokens: int,
    max_model_len: int,
) -> AttentionBackend:
    """Makes the backend `name` for a model's layers; the page size comes later, from `bind_kv_caches`.

    Args:
        name: one of `available_backends()`.
        specs: one per layer; the index is the layer_id.
        device: where caches, queries and device metadata lie.
        dtype: of queries and caches.
        max_num_seqs: sequences a step at most, padding rows of a graph bucket included.
        max_num_tokens: tokens a step at most, padding included.
        max_model_len: KV length of a sequence at most.

    Raises:
        ValueError: an unknown or unavailable name (lists what is available and why the others are not), a spec that
            the backend cannot serve, or a limit below 1.
    """
    loaded, reasons = _load_all()
    if name not in loaded:
        others = "".join(f"; {other!r} is not: {reason}" for other, reason in reasons.items())
        raise ValueError(f"no attention backend {name!r}; available are {sorted(loaded)}{others}")
    return loaded[name](
        specs,
        device=torch.device(device),
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        max_num_tokens=max_num_tokens,
        max_model_len=max_model_len,
    )


def available_backends() -> tuple[str, ...]:
    """Names that `create_backend` accepts in this environment, sorted."""
    return tuple(sorted(_load_all()[0]))


def unavailable_backends() -> dict[str, str]:
    """Names that are declared but cannot be used in this environment, each with the reason."""
    return _load_all()[1]


def _load_all() -> tuple[dict[str, type[AttentionBackend]], dict[str, str]]:
    loaded: dict[str, type[AttentionBackend]] = {}
    reasons: dict[str, str] = {}
    for point in (*_BUILT_IN, *entry_points(group=ENTRY_POINT_GROUP)):
        if point.name in loaded or point.name in reasons:
            raise ValueError(f"attention backend {point.name!r} is declared twice, the second time as {point.value}")
        try:
            backend = point.load()
        except (ImportError, AttributeError) as error:
            reasons[point.name] = f"{point.value} cannot be loaded: {error}"
            continue
        if isinstance(backend, type) and issubclass(backend, AttentionBackend):
            loaded[point.name] = backend
        else:
            reasons[point.name] = f"{point.value} is not a subclass of AttentionBackend"
    return loaded, reasons
