"""Checks of the caches at binding time, the same for every backend. Owns no state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xllm_metadata import CacheKind, CacheSpec, LayerCache

from .limits import BackendLimits
from .memory import share_memory
from .spec import LayerSpec

_LEADING = {CacheKind.PAGED: ("num_pages", "page_size"), CacheKind.STATE: ("num_slots",)}


def check_caches(
    caches: Sequence[LayerCache], specs: Sequence[LayerSpec], limits: BackendLimits, kv_groups: Sequence[int]
) -> int:
    """Checks that the caches fit the layers, and returns the common page size; 0 if no cache has pages.

    kv_groups: the KV cache group of each layer. All caches of a group have the same number of pages.

    Raises:
        ValueError: names the layer, the tensor, what it has and what it must have. A tensor that the layer does not
            need is refused too: the backend would ignore it. So are two tensors that share memory, unless both layers'
            specs have `shared_cache`.
    """
    if len(caches) != len(specs):
        raise ValueError(f"{len(caches)} caches for {len(specs)} layers; every layer needs one")
    # Dimension -> size -> the first tensor of that size. The layers of a KV cache group share one page table, and all
    # layers share one list of state slots.
    found: dict[str, dict[int, str]] = {"page_size": {}}
    for layer_id, (cache, spec, kv_group) in enumerate(zip(caches, specs, kv_groups, strict=True)):
        needed = spec.cache_specs(limits.dtype)
        names = [one.name for one in needed]
        for slot, unused in cache.items():
            if slot not in names:
                raise ValueError(
                    f"{slot} cache of layer {layer_id} has shape {list(unused.shape)}; its layer needs only "
                    f"{' and '.join(names)}"
                )
        for one in needed:
            name = f"{one.name} cache of layer {layer_id}"
            tensor = getattr(cache, one.name)
            if tensor is None:
                raise ValueError(f"{name} is None")
            _check_tensor(name, tensor, one, limits.device)
            for dimension, size in zip(_LEADING[one.kind], tensor.shape, strict=False):
                if dimension == "num_pages" and max(kv_groups):
                    dimension = f"num_pages of KV cache group {kv_group}"
                found.setdefault(dimension, {}).setdefault(size, name)
    for dimension, sizes in found.items():
        if len(sizes) > 1:
            listed = ", ".join(f"{size} ({name})" for size, name in sizes.items())
            raise ValueError(f"{dimension} differs: {listed}; all caches must have the same")
    if limits.device.type != "meta":  # which has no addresses
        _check_distinct(caches, specs)
    return next(iter(found["page_size"]), 0)


def _check_distinct(caches: Sequence[LayerCache], specs: Sequence[LayerSpec]) -> None:
    """Refuses tensors that share memory: one would overwrite the other's entries."""
    bound = [
        (tensor, f"{slot} cache of layer {layer_id}", getattr(spec, "shared_cache", False))
        for layer_id, (cache, spec) in enumerate(zip(caches, specs, strict=True))
        for slot, tensor in cache.items()
    ]
    bound.sort(key=lambda one: one[0].data_ptr())
    for i, (first, name, shared) in enumerate(bound):
        end = first.data_ptr() + _extent(first) * first.element_size()
        for second, other_name, other_shared in bound[i + 1 :]:
            if second.data_ptr() >= end:
                break
            if not (shared and other_shared) and share_memory(first, second):
                raise ValueError(
                    f"{name} and {other_name} share memory; each needs its own, unless the specs of the layers have "
                    "shared_cache"
                )


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one, both included."""
    return 1 + sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _check_tensor(name: str, tensor: torch.Tensor, spec: CacheSpec, device: torch.device) -> None:
    leading = _LEADING[spec.kind]
    if tensor.dim() != len(leading) + len(spec.shape) or tensor.shape[len(leading) :] != spec.shape:
        needed = ", ".join((*leading, *map(str, spec.shape)))
        raise ValueError(f"{name} has shape {list(tensor.shape)}; its layer needs [{needed}]")
    for size, what in zip(tensor.shape, leading, strict=False):
        if size < 1:
            raise ValueError(f"{name} has {what} {size}; it must be at least 1")
    if tensor.dtype is not spec.dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}; its layer needs {spec.dtype}")
    if tensor.device.type != device.type or device.index not in (None, tensor.device.index):
        raise ValueError(f"{name} is on {tensor.device}; the backend was made for {device}")
    if _overlaps(tensor):
        raise ValueError(f"{name} has strides {tensor.stride()} for shape {list(tensor.shape)}; elements overlap")


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory: some stride is shorter than the extent of the dimensions below it."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < extent:
            return True
        extent = max(extent, stride * (size - 1) + extent)
    return False
