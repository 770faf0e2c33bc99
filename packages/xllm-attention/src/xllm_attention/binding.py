"""Checks of the KV caches at binding time, the same for every backend. Owns no state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from xllm_metadata import LayerCache

from .limits import BackendLimits
from .memory import share_memory
from .spec import AttentionSpec

_USED_SLOTS: Final = ("k", "v")  # of `LayerCache`; the others belong to sparse and linear attention


def check_caches(caches: Sequence[LayerCache], specs: Sequence[AttentionSpec], limits: BackendLimits) -> int:
    """Checks that the caches fit the layers, and returns their common page size.

    Raises:
        ValueError: names the layer, the tensor, what it has and what it must have. A tensor in a slot that paged
            attention does not use (index, conv, ssm) is refused too: the backend would ignore it. So are two tensors
            that share memory, unless both layers' specs have `shared_cache`.
    """
    if len(caches) != len(specs):
        raise ValueError(f"{len(caches)} KV caches for {len(specs)} layers; every layer needs one")
    # Value -> first layer that has it. All layers share one page table.
    num_pages: dict[int, int] = {}
    page_sizes: dict[int, int] = {}
    for layer_id, (cache, spec) in enumerate(zip(caches, specs, strict=True)):
        for slot, unused in cache.items():
            if slot not in _USED_SLOTS:
                raise ValueError(
                    f"{slot} cache of layer {layer_id} has shape {list(unused.shape)}; its layer is paged attention, "
                    f"which uses only {' and '.join(_USED_SLOTS)}"
                )
        for slot, tensor in (("k", cache.k), ("v", cache.v)):
            name = f"{slot} cache of layer {layer_id}"
            if tensor is None:
                raise ValueError(f"{name} is None")
            _check_tensor(name, tensor, spec, limits)
            num_pages.setdefault(tensor.shape[0], layer_id)
            page_sizes.setdefault(tensor.shape[1], layer_id)
        if cache.k is not None and cache.v is not None and cache.k.shape != cache.v.shape:
            raise ValueError(
                f"k and v cache of layer {layer_id} have shapes {list(cache.k.shape)} and {list(cache.v.shape)}; "
                "they must be equal"
            )
    for what, values in (("page sizes", page_sizes), ("num_pages", num_pages)):
        if len(values) > 1:
            listed = ", ".join(f"{value} (layer {layer_id})" for value, layer_id in values.items())
            raise ValueError(f"{what} differ: {listed}; all caches must have the same")
    if limits.device.type != "meta":  # which has no addresses
        _check_distinct(caches, specs)
    return next(iter(page_sizes))


def _check_distinct(caches: Sequence[LayerCache], specs: Sequence[AttentionSpec]) -> None:
    """Refuses tensors that share memory: one would overwrite the other's keys or values."""
    bound = [
        (tensor, f"{slot} cache of layer {layer_id}", spec.shared_cache)
        for layer_id, (cache, spec) in enumerate(zip(caches, specs, strict=True))
        for slot, tensor in (("k", cache.k), ("v", cache.v))
        if tensor is not None
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


def _check_tensor(name: str, tensor: torch.Tensor, spec: AttentionSpec, limits: BackendLimits) -> None:
    device, dtype = limits.device, limits.dtype
    if tensor.dim() != 4:
        raise ValueError(
            f"{name} has {tensor.dim()} dimensions; it must have 4: [num_pages, page_size, num_kv_heads, head_dim]"
        )
    for axis, what, expected in ((2, "num_kv_heads", spec.num_kv_heads), (3, "head_dim", spec.head_dim)):
        if tensor.shape[axis] != expected:
            raise ValueError(f"{name} has {what} {tensor.shape[axis]}; its layer has {expected}")
    for axis, what in ((0, "num_pages"), (1, "page_size")):
        if tensor.shape[axis] < 1:
            raise ValueError(f"{name} has {what} {tensor.shape[axis]}; it must be at least 1")
    if tensor.dtype is not dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}; the backend was made for {dtype}")
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
