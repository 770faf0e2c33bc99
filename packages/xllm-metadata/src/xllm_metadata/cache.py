"""`LayerCache`: the KV cache tensors of one layer, by name. Owns no memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Cache tensors of one layer by name; None for those that the layer does not have.

    Paged attention uses `k` and `v`, each [num_pages, page_size, num_kv_heads, head_dim] in the cache dtype.
    The others are reserved for layers that keep other state: `index` for sparse-attention indexers, `conv` and `ssm`
    for linear attention.
    """

    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    index: torch.Tensor | None = None
    conv: torch.Tensor | None = None
    ssm: torch.Tensor | None = None

    @classmethod
    def from_tensors(cls, tensors: Sequence[torch.Tensor | None] | LayerCache) -> LayerCache:
        """Names the tensors of a (k, v, ...) sequence, as a C++ host passes them. Returns a `LayerCache` unchanged.

        Raises:
            ValueError: more tensors than names.
        """
        if isinstance(tensors, LayerCache):
            return tensors
        names = [field.name for field in fields(cls)]
        if len(tensors) > len(names):
            raise ValueError(f"a layer's cache has {len(tensors)} tensors; at most {len(names)} are known: {names}")
        return cls(*tensors)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of those that are not None."""
        for field in fields(self):
            tensor = getattr(self, field.name)
            if tensor is not None:
                yield field.name, tensor
