"""`LayerCache`, the cache tensors of one layer by name, and `CacheSpec`, what a host must allocate for one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Final

import torch


class CacheKind(Enum):
    """What the first dimensions of a cache tensor count."""

    PAGED = "paged"  # [num_pages, page_size, *shape]: one entry per token, in the pages of a sequence
    STATE = "state"  # [num_slots, *shape]: one entry per sequence, in its state slot


CACHE_KINDS: Final[Mapping[str, CacheKind]] = {
    "k": CacheKind.PAGED,
    "v": CacheKind.PAGED,
    "index": CacheKind.PAGED,
    "conv": CacheKind.STATE,
    "ssm": CacheKind.STATE,
}
"""The kind of each tensor of `LayerCache`."""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One cache tensor that a layer needs. A host allocates it, and binds it before the first step.

    Attributes:
        name: of a tensor of `LayerCache`.
        shape: of one entry: of a token in a page, or of a sequence's state.
        dtype: of the tensor.
        group: KV cache group of the layer: tensors of one group have the same number of pages and share a page table.
            A host with one table for all layers ignores it.
        window: number of keys that a query of the group sees, its own included; 0: all. A host with a page table per
            group may free a page as soon as no later query sees a token of it.

    Raises:
        ValueError: an unknown name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        if self.name not in CACHE_KINDS:
            raise ValueError(f"no cache tensor {self.name!r}; known are {', '.join(CACHE_KINDS)}")

    @property
    def kind(self) -> CacheKind:
        """Whether the tensor has pages or state slots."""
        return CACHE_KINDS[self.name]

    def tensor_shape(self, *, num_pages: int, page_size: int, num_slots: int) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        leading = (num_pages, page_size) if self.kind is CacheKind.PAGED else (num_slots,)
        return (*leading, *self.shape)

    @property
    def bytes_per_entry(self) -> int:
        """Bytes of a token in a page, or of a sequence's state."""
        size = self.dtype.itemsize
        for dimension in self.shape:
            size *= dimension
        return size


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Cache tensors of one layer by name; None for those that the layer does not have.

    Attention uses `k` and `v`, each [num_pages, page_size, num_kv_heads, head_dim], or `k` alone where values are part
    of the keys (latent attention). Linear attention uses `conv` and `ssm`, each [num_slots, ...]. `index` is reserved
    for sparse-attention indexers.
    """

    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    index: torch.Tensor | None = None
    conv: torch.Tensor | None = None
    ssm: torch.Tensor | None = None

    @classmethod
    def from_tensors(
        cls, tensors: Sequence[torch.Tensor | None] | LayerCache, specs: Sequence[CacheSpec] | None = None
    ) -> LayerCache:
        """Names the tensors of a sequence, as a C++ host passes them. Returns a `LayerCache` unchanged.

        Args:
            tensors: in the order of `specs`.
            specs: of the layer. None: the tensors are k and v.

        Raises:
            ValueError: another number of tensors than of specs.
        """
        if isinstance(tensors, LayerCache):
            return tensors
        names = ["k", "v"] if specs is None else [spec.name for spec in specs]
        if len(tensors) != len(names):
            raise ValueError(f"a layer's cache has {len(tensors)} tensors; it needs {len(names)}: {', '.join(names)}")
        return cls(**dict(zip(names, tensors, strict=True)))

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of those that are not None."""
        for field in fields(self):
            tensor = getattr(self, field.name)
            if tensor is not None:
                yield field.name, tensor

    def of_kind(self, kind: CacheKind) -> list[torch.Tensor]:
        """The tensors of a kind, in the order of the names."""
        return [tensor for name, tensor in self.items() if CACHE_KINDS[name] is kind]


def allocate_caches(
    layers: Sequence[Sequence[CacheSpec]],
    *,
    num_pages: int | Sequence[int],
    page_size: int,
    num_slots: int = 1,
    device: torch.device | str = "cpu",
    fill: float = 0.0,
) -> list[LayerCache]:
    """Allocates the caches of a model: for tests and tools. A C++ host allocates its own.

    Args:
        layers: the specs of each layer's cache tensors.
        num_pages, page_size: of the paged tensors. A sequence has the number of pages of each KV cache group.
        num_slots: of the state tensors.
        device: of all tensors.
        fill: the value of every element.
    """

    def allocate(spec: CacheSpec) -> torch.Tensor:
        pages = num_pages if isinstance(num_pages, int) else num_pages[spec.group]
        shape = spec.tensor_shape(num_pages=pages, page_size=page_size, num_slots=num_slots)
        return torch.full(shape, fill, dtype=spec.dtype, device=device)

    return [LayerCache(**{spec.name: allocate(spec) for spec in specs}) for specs in layers]
