"""KV cache groups: which layers share a page table, and the table of a group in a step's metadata. Owns no tensor.

A host may free the pages that have left a layer's sliding window. Then layers of different windows cannot share a page
table, and each window size has a KV cache group of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from xllm_metadata import AttentionMetadata

from .spec import AttentionSpec, LayerSpec

GROUP_FIELDS: Final = frozenset({"group_slot_mapping", "group_paged_kv_indices"})
"""Optional fields of the metadata with the tables of KV cache groups from 1 on."""


def group_windows(specs: Sequence[LayerSpec]) -> tuple[int, ...]:
    """The sliding window of each KV cache group; that of group 0 is 0.

    Group 0 has the layers without a window, or none. Groups from 1 on are in the order of their first layers.
    """
    return tuple(dict.fromkeys((0, *(_window(spec) for spec in specs))))


def kv_groups(specs: Sequence[LayerSpec]) -> tuple[int, ...]:
    """The KV cache group of each layer. Layers whose cache has no pages are in group 0."""
    windows = group_windows(specs)
    return tuple(windows.index(_window(spec)) for spec in specs)


def slots_of(metadata: AttentionMetadata, kv_group: int) -> torch.Tensor:
    """Slots [T] int32 that the step's tokens write in a KV cache group."""
    if kv_group == 0:
        return metadata.slot_mapping
    slots = metadata.group_slot_mapping
    assert slots is not None  # `AttentionBackend.check_step` has checked it
    return slots[kv_group - 1]


def pages_of(metadata: AttentionMetadata, kv_group: int) -> torch.Tensor:
    """Page indices [P] int32 of a KV cache group, at the offsets of paged_kv_indptr."""
    if kv_group == 0:
        return metadata.paged_kv_indices
    pages = metadata.group_paged_kv_indices
    assert pages is not None  # `AttentionBackend.check_step` has checked it
    return pages[kv_group - 1]


def _window(spec: LayerSpec) -> int:
    return spec.sliding_window if isinstance(spec, AttentionSpec) else 0
