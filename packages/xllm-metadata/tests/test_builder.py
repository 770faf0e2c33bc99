"""The reference builder against per-token arithmetic, and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xllm_metadata import build_attention_metadata, validate


def test_a_mixed_step_by_hand() -> None:
    step = build_attention_metadata([2, 1, 0], [5, 4, 0], [[3, 1], [7], []], page_size=4)
    assert step.slot_mapping.tolist() == [3 * 4 + 3, 1 * 4 + 0, 7 * 4 + 3]
    assert step.paged_kv_indptr.tolist() == [0, 2, 3, 3]
    assert step.paged_kv_indices.tolist() == [3, 1, 7]
    assert step.paged_kv_last_page_len.tolist() == [1, 4, 0]
    assert step.kv_cu_seq_lens.tolist() == [0, 5, 9, 9]
    assert step.qo_indptr is not None
    assert step.qo_indptr.tolist() == [0, 2, 3, 3]
    assert step.q_cu_seq_lens is step.qo_indptr
    assert (step.max_query_len, step.max_seq_len) == (2, 5)
    assert (step.is_prefill, step.is_chunked_prefill) == (False, True)
    assert all(t.dtype == torch.int32 for t in (step.slot_mapping, step.kv_seq_lens_host, step.qo_indptr))


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "flags", "has_qo"),
    [
        ([3, 2], [3, 2], (True, False), True),
        ([3, 0], [3, 0], (True, False), True),
        ([1, 1], [5, 1], (False, False), False),
        ([1], [1], (False, False), False),
        ([2], [5], (False, True), True),
        ([1, 3], [4, 3], (False, True), True),
        ([], [], (False, False), False),
    ],
)
def test_phase(q_lens: list[int], kv_lens: list[int], flags: tuple[bool, bool], has_qo: bool) -> None:
    tables = [list(range(8 * i, 8 * i + 8)) for i in range(len(q_lens))]
    step = build_attention_metadata(q_lens, kv_lens, tables, page_size=4)
    assert (step.is_prefill, step.is_chunked_prefill) == flags
    assert (step.qo_indptr is not None) == has_qo
    assert (step.qo_indptr_host is not None) == has_qo


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_every_token_lands_in_its_page_and_the_step_is_valid(data: st.DataObject, batch_strategy: Any) -> None:
    batch = data.draw(batch_strategy)
    step = build_attention_metadata(batch.q_lens, batch.kv_lens, batch.page_tables, batch.page_size)
    expected = [
        table[position // batch.page_size] * batch.page_size + position % batch.page_size
        for q_len, kv_len, table in zip(batch.q_lens, batch.kv_lens, batch.page_tables, strict=True)
        for position in range(kv_len - q_len, kv_len)
    ]
    assert step.slot_mapping.tolist() == expected
    validate(
        step,
        num_tokens=len(expected),
        num_seqs=len(batch.q_lens),
        num_pages=batch.num_pages,
        page_size=batch.page_size,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], [1, 2], [[0]], 4), "q_lens, kv_lens and page_tables have 1, 2 and 1 entries"),
        (([2], [1], [[0]], 4), "sequence 0: q_len 2 must be between 0 and its kv_len 1"),
        (([-1], [1], [[0]], 4), "sequence 0: q_len -1"),
        (([1], [5], [[0]], 4), "sequence 0: kv_len 5 needs 2 pages of 4, its page table has 1"),
        (([1], [1], [[-2]], 4), "sequence 0: page index -2 is negative"),
        (([], [], [], 0), "page_size is 0"),
    ],
)
def test_contradictions_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_attention_metadata(*arguments)


def test_tables_of_kv_cache_groups() -> None:
    tables = [[[1, 5], [0, 2]], [[0, 1], [2, 0]]]
    step = build_attention_metadata([3, 1], [6, 5], [[4, 2], [9, 3]], 4, group_page_tables=tables)
    plain = build_attention_metadata([3, 1], [6, 5], [[4, 2], [9, 3]], 4)
    assert step.group_slot_mapping is not None
    assert step.group_paged_kv_indices is not None
    assert step.group_slot_mapping.tolist() == [[7, 20, 21, 8], [3, 4, 5, 0]]
    assert step.group_paged_kv_indices.tolist() == [[1, 5, 0, 2], [0, 1, 2, 0]]
    assert step.slot_mapping.equal(plain.slot_mapping)
    assert step.paged_kv_indices.equal(plain.paged_kv_indices)
    assert plain.group_slot_mapping is None
    empty = build_attention_metadata([], [], [], 4, group_page_tables=[[], []])
    assert empty.group_slot_mapping is not None
    assert empty.group_slot_mapping.shape == (2, 0)
    with pytest.raises(ValueError, match="sequence 0: kv_len 5 needs 2 pages of 4, its page table has 1"):
        build_attention_metadata([1], [5], [[0, 1]], 4, group_page_tables=[[[3]]])


def test_state_slots() -> None:
    step = build_attention_metadata([2, 1], [2, 4], [[0], [1]], 4, state_slots=[3, -1], state_write_slots=[3, 2])
    assert step.linear_state_indices is not None
    assert step.linear_state_write_indices is not None
    assert step.has_initial_state is not None
    assert step.linear_state_indices.tolist() == [3, -1]
    assert step.linear_state_write_indices.tolist() == [3, 2]
    assert step.has_initial_state.tolist() == [False, True]
    assert build_attention_metadata([1], [1], [[0]], 4).linear_state_indices is None


@pytest.mark.parametrize("name", ["state_slots", "state_write_slots"])
def test_one_state_slot_per_sequence(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has 1 entries; the step has 2 sequences"):
        build_attention_metadata([1, 1], [1, 1], [[0], [1]], 4, **{name: [0]})
