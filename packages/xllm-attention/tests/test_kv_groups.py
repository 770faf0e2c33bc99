"""KV cache groups: which layers form one, and what the base class checks of their caches and page tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from xllm_attention import AttentionBackend, AttentionSpec, BackendLimits, create_backend, group_windows, kv_groups
from xllm_attention.kv_groups import GROUP_FIELDS
from xllm_metadata import LayerCache, build_attention_metadata

LIMITS = BackendLimits(
    device=torch.device("cpu"), dtype=torch.float32, max_num_seqs=8, max_num_tokens=64, max_model_len=40
)
GROUPED = replace(LIMITS, kv_groups=True)


def of_windows(spec: AttentionSpec, windows: Sequence[int]) -> list[AttentionSpec]:
    return [replace(spec, sliding_window=window) for window in windows]


@pytest.mark.parametrize(
    ("windows", "groups", "found"),
    [
        ((0, 0), (0, 0), (0,)),
        ((8, 8, 0, 8), (1, 1, 0, 1), (0, 8)),
        ((8, 8), (1, 1), (0, 8)),  # group 0 has no layer
        ((0, 16, 8, 16), (0, 1, 2, 1), (0, 16, 8)),
    ],
)
def test_layers_of_equal_window_form_a_group(
    spec: AttentionSpec, windows: tuple[int, ...], groups: tuple[int, ...], found: tuple[int, ...]
) -> None:
    specs = of_windows(spec, windows)
    assert kv_groups(specs) == groups
    assert group_windows(specs) == found
    backend = create_backend("torch", specs, GROUPED)
    assert backend.kv_group_of_layer == groups
    assert backend.num_group_tables == len(found) - 1
    assert backend.optional_fields == (GROUP_FIELDS if len(found) > 1 else frozenset())
    one_table = create_backend("torch", specs, LIMITS)
    assert one_table.kv_group_of_layer == (0,) * len(windows)
    assert one_table.optional_fields == frozenset()


def test_layers_of_other_shapes_share_the_group_of_their_window(spec: AttentionSpec) -> None:
    """They are different attention groups."""
    local = replace(spec, sliding_window=8)
    specs = [spec, local, replace(local, logits_soft_cap=2.0), replace(spec, scale=1.0)]
    backend = create_backend("torch", specs, GROUPED)
    assert backend.kv_group_of_group == (0, 1, 1, 0)


def caches(*num_pages: int) -> list[LayerCache]:
    return [LayerCache(k=torch.zeros(n, 4, 2, 8), v=torch.zeros(n, 4, 2, 8)) for n in num_pages]


def test_each_group_has_its_own_number_of_pages(spec: AttentionSpec) -> None:
    specs = of_windows(spec, (0, 8, 0, 8))
    create_backend("torch", specs, GROUPED).bind_kv_caches(caches(9, 5, 9, 5))
    with pytest.raises(
        ValueError,
        match=r"num_pages of KV cache group 1 differs: 5 \(k cache of layer 1\), 6 \(k cache of layer 3\); all",
    ):
        create_backend("torch", specs, GROUPED).bind_kv_caches(caches(9, 5, 9, 6))
    with pytest.raises(ValueError, match=r"num_pages differs: 9 .*, 5 .*; all caches must have the same"):
        create_backend("torch", specs, LIMITS).bind_kv_caches(caches(9, 5, 9, 5))


def bound(spec: AttentionSpec) -> AttentionBackend:
    backend = create_backend("torch", of_windows(spec, (0, 8)), GROUPED)
    backend.bind_kv_caches(caches(9, 5))
    return backend


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"group_slot_mapping": None},
            "group_slot_mapping is None; the backend serves 1 KV cache groups besides group 0",
        ),
        ({"group_paged_kv_indices": None}, "group_paged_kv_indices is None"),
        ({"group_slot_mapping": torch.zeros((2, 1), dtype=torch.int32)}, r"shape \[2, 1\]; it must be \[1, 1\]"),
        ({"group_paged_kv_indices": torch.zeros((1, 1), dtype=torch.int32)}, r"shape \[1, 1\]; it must be \[1, 2\]"),
    ],
)
def test_a_step_must_have_the_tables_of_all_groups(spec: AttentionSpec, changes: dict[str, Any], message: str) -> None:
    backend = bound(spec)
    step = build_attention_metadata([1], [6], [[4, 2]], 4, group_page_tables=[[[0, 3]]])
    backend.plan(step)
    with pytest.raises(ValueError, match=message):
        backend.plan(replace(step, **changes))
    with pytest.raises(ValueError, match=message):
        backend.check_step(replace(step, **changes))


def test_a_host_with_one_table_needs_no_group_fields(spec: AttentionSpec) -> None:
    backend = create_backend("torch", of_windows(spec, (0, 8)), LIMITS)
    backend.bind_kv_caches(caches(9, 9))
    backend.plan(build_attention_metadata([1], [6], [[4, 2]], 4))
