"""validate: accepts legal steps, and rejects each corruption with a message that names field and value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from xllm_metadata import FIELDS, BuiltAttentionMetadata, build_attention_metadata, check_present, validate

PAGE_SIZE, NUM_PAGES = 4, 16
MIXED = build_attention_metadata([3, 1], [6, 5], [[4, 2], [9, 3]], PAGE_SIZE)
DECODE = build_attention_metadata([1, 1], [6, 5], [[4, 2], [9, 3]], PAGE_SIZE)
PREFILL = build_attention_metadata([6, 5], [6, 5], [[4, 2], [9, 3]], PAGE_SIZE)


def check(step: BuiltAttentionMetadata, num_tokens: int = 4, num_seqs: int = 2) -> None:
    validate(step, num_tokens=num_tokens, num_seqs=num_seqs, num_pages=NUM_PAGES, page_size=PAGE_SIZE)


def with_value(name: str, index: int, value: int, *, mirror: str | None = None) -> Callable[[Any], Any]:
    """Changes one element of a field and of its mirror, so that there is no fault but the intended one."""

    def corrupt(step: BuiltAttentionMetadata) -> BuiltAttentionMetadata:
        changes = {}
        for field in (name, *([mirror] if mirror else [])):
            changes[field] = getattr(step, field).clone()
            changes[field][index] = value
        return dataclasses.replace(step, **changes)

    return corrupt


def replace(**changes: Any) -> Callable[[Any], Any]:
    return lambda step: dataclasses.replace(step, **changes)


STATES = build_attention_metadata(
    [3, 1], [6, 1], [[4, 2], [9]], PAGE_SIZE, state_slots=[5, 0], state_write_slots=[7, 0]
)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (with_value("linear_state_indices", 1, -2), r"linear_state_indices\[1\] is -2; it must be -1 or a state slot"),
        (with_value("linear_state_write_indices", 0, -3), r"linear_state_write_indices\[0\] is -3"),
        (
            with_value("linear_state_write_indices", 1, 7),
            r"linear_state_write_indices\[1\] is 7; sequences 0 and 1 both write it",
        ),
        (
            lambda s: replace(linear_state_write_indices=None)(with_value("linear_state_indices", 1, 5)(s)),
            r"linear_state_indices\[1\] is 5; sequences 0 and 1 both write it",
        ),
        (
            with_value("linear_state_indices", 1, 7),
            r"linear_state_indices\[1\] is 7, which sequence 0 writes in this step",
        ),
        (replace(linear_state_indices=None), "linear_state_write_indices is present without linear_state_indices"),
        (
            with_value("has_initial_state", 0, False),
            r"has_initial_state\[0\] is False; sequence 0 has 3 tokens before this step's",
        ),
        (
            with_value("has_initial_state", 1, True),
            r"has_initial_state\[1\] is True; sequence 1 has 0 tokens before this step's",
        ),
    ],
)
def test_states_are_checked(corrupt: Callable[[Any], Any], message: str) -> None:
    check(STATES)
    with pytest.raises(ValueError, match=message):
        check(corrupt(STATES))


@pytest.mark.parametrize("name", ["linear_state_indices", "linear_state_write_indices"])
def test_a_slot_beyond_the_caches_is_named(name: str) -> None:
    sizes = {"num_tokens": 4, "num_seqs": 2, "num_pages": NUM_PAGES, "page_size": PAGE_SIZE}
    validate(STATES, **sizes, num_slots=8)
    with pytest.raises(ValueError, match=rf"{name}\[1\] is 8; it must be -1 or 0 to 7"):
        validate(with_value(name, 1, 8)(STATES), **sizes, num_slots=8)


def test_sequences_may_read_one_state_and_have_none() -> None:
    """A fork reads the state of another sequence, and padding has no slot."""
    check(with_value("linear_state_indices", 1, 5)(STATES))
    check(build_attention_metadata([1, 1], [6, 5], [[4, 2], [9, 3]], PAGE_SIZE, state_slots=[-1, -1]), num_tokens=2)


GROUPS = build_attention_metadata(  # sequence 0 has freed the first page of group 2
    [3, 1], [6, 5], [[4, 2], [9, 3]], PAGE_SIZE, group_page_tables=[[[1, 5], [0, 2]], [[0, 1], [2, 0]]]
)


def check_groups(step: Any, *group_num_pages: int) -> None:
    validate(
        step,
        num_tokens=4,
        num_seqs=2,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        group_num_pages=group_num_pages or None,
    )


def group_value(name: str, group: int, index: int, value: int) -> Callable[[Any], Any]:
    """Changes one element of a field [G, ...]."""

    def corrupt(step: BuiltAttentionMetadata) -> BuiltAttentionMetadata:
        tensor = getattr(step, name).clone()
        tensor[group, index] = value
        return dataclasses.replace(step, **{name: tensor})

    return corrupt


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (replace(group_slot_mapping=None), "group_slot_mapping is None; a step with page tables of KV cache groups"),
        (replace(group_paged_kv_indices=None), "group_paged_kv_indices is None; a step with page tables of"),
        (
            replace(group_slot_mapping=torch.zeros((1, 4), dtype=torch.int32)),
            r"group_slot_mapping has shape \[1, 4\]; it must be \[2, 4\]",
        ),
        (
            replace(group_paged_kv_indices=torch.zeros((2, 5), dtype=torch.int32)),
            r"group_paged_kv_indices has shape \[2, 5\]; it must be \[2, 4\]",
        ),
        (
            replace(group_slot_mapping=torch.zeros((2, 3), dtype=torch.int32)),
            "group_slot_mapping has 3 entries; T is 4",
        ),
        (
            replace(group_slot_mapping=torch.zeros((2, 4), dtype=torch.int64)),
            "group_slot_mapping has dtype torch.int64",
        ),
        (
            group_value("group_paged_kv_indices", 0, 1, 6),
            r"group_paged_kv_indices\[0\]\[1\] is 6; a page of KV cache group 1 is 0 to 5",
        ),
        (group_value("group_paged_kv_indices", 1, 0, -1), r"group_paged_kv_indices\[1\]\[0\] is -1"),
        (group_value("group_slot_mapping", 1, 3, 12), r"group_slot_mapping\[1\]\[3\] is 12; it must be -1 to 11"),
        (
            group_value("group_slot_mapping", 1, 0, 5),
            r"group_slot_mapping\[1\]\[0\] is 5; by group_paged_kv_indices\[1\], position 3 of sequence 0 has slot 3",
        ),
    ],
)
def test_kv_cache_groups_are_checked(corrupt: Callable[[Any], Any], message: str) -> None:
    check_groups(GROUPS, 6, 3)
    with pytest.raises(ValueError, match=message):
        check_groups(corrupt(GROUPS), 6, 3)


def test_a_step_without_the_tables_of_its_groups_is_refused() -> None:
    check_groups(MIXED)
    with pytest.raises(ValueError, match="group_slot_mapping is None"):
        check_groups(MIXED, 6)
    with pytest.raises(ValueError, match=r"group_slot_mapping has shape \[2, 4\]; it must be \[1, 4\]"):
        check_groups(GROUPS, 6)


def test_two_sequences_that_write_one_slot_of_a_group_are_named() -> None:
    step = build_attention_metadata([3, 1], [6, 5], [[4, 2], [9, 3]], PAGE_SIZE, group_page_tables=[[[1, 5], [0, 5]]])
    with pytest.raises(ValueError, match=r"group_slot_mapping\[0\]\[3\] is 20; sequences 0 and 1 both write it"):
        check_groups(step)


def test_legal_steps_are_accepted() -> None:
    check(MIXED)
    check(DECODE, num_tokens=2)
    check(PREFILL, num_tokens=11)
    check(build_attention_metadata([], [], [], PAGE_SIZE), num_tokens=0, num_seqs=0)
    check(build_attention_metadata([0, 2], [0, 2], [[], [1]], PAGE_SIZE), num_tokens=2)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda s: dataclasses.replace(s, slot_mapping=s.slot_mapping.long()), "slot_mapping has dtype torch.int64"),
        (lambda s: dataclasses.replace(s, qo_indptr=s.qo_indptr.to("meta")), "qo_indptr is on device meta"),
        (lambda s: dataclasses.replace(s, kv_cu_seq_lens=s.kv_cu_seq_lens[None]), "kv_cu_seq_lens has 2 dimensions"),
        (lambda s: dataclasses.replace(s, slot_mapping=s.slot_mapping[:3]), "slot_mapping has 3 entries; T is 4"),
        (lambda s: dataclasses.replace(s, kv_cu_seq_lens=s.kv_cu_seq_lens[:2]), r"kv_cu_seq_lens has 2 .*B\+1 is 3"),
        (lambda s: dataclasses.replace(s, slot_mapping=torch.zeros(8, dtype=torch.int32)[::2]), "must be contiguous"),
        (replace(qo_indptr=None), "qo_indptr is None"),
        (replace(paged_kv_indices=None), "paged_kv_indices is None"),
        (with_value("paged_kv_indptr", 1, 5, mirror="paged_kv_indptr_host"), r"paged_kv_indptr\[2\] is 4, below"),
        (with_value("kv_cu_seq_lens", 0, 1, mirror="kv_seq_lens_host"), r"kv_cu_seq_lens\[0\] is 1; it must be 0"),
        (with_value("kv_cu_seq_lens", 1, 9, mirror="kv_seq_lens_host"), "sequence 0 2 pages of 4; its KV length 9"),
        (with_value("paged_kv_indices", 1, 16), r"paged_kv_indices\[1\] is 16; the cache has pages 0 to 15"),
        (with_value("paged_kv_indices", 1, -1), r"paged_kv_indices\[1\] is -1"),
        (with_value("slot_mapping", 0, 64), r"slot_mapping\[0\] is 64; it must be -1 to 63"),
        (with_value("slot_mapping", 0, -2), r"slot_mapping\[0\] is -2"),
        (
            with_value("slot_mapping", 0, 18),
            r"slot_mapping\[0\] is 18; by paged_kv_indices, position 3 of sequence 0 has slot 19",
        ),
        (with_value("slot_mapping", 3, -1), r"slot_mapping\[3\] is -1; by paged_kv_indices, position 4 of sequence 1"),
        (
            with_value("paged_kv_last_page_len", 0, 0, mirror="paged_kv_last_page_len_host"),
            r"paged_kv_last_page_len\[0\] is 0; with KV length 6 in kv_cu_seq_lens it must be 1 to 4",
        ),
        (
            with_value("paged_kv_last_page_len", 0, 5, mirror="paged_kv_last_page_len_host"),
            r"paged_kv_last_page_len\[0\] is 5",
        ),
        (
            with_value("paged_kv_last_page_len", 0, 3, mirror="paged_kv_last_page_len_host"),
            r"paged_kv_last_page_len\[0\] is 3; with 2 pages of 4 that is KV length 7, kv_cu_seq_lens has 6",
        ),
        (with_value("kv_seq_lens_host", 1, 5), r"kv_seq_lens_host\[1\] is 5; kv_cu_seq_lens on the device has 6"),
        (with_value("qo_indptr_host", 1, 2), r"qo_indptr_host\[1\] is 2; qo_indptr on the device has 3"),
        (replace(is_prefill=True), "is_prefill and is_chunked_prefill are both True"),
        (
            replace(is_prefill=True, is_chunked_prefill=False),
            "is_prefill: sequence 0 has 3 tokens in qo_indptr and KV length 6",
        ),
        (replace(is_chunked_prefill=False), r"qo_indptr is present with shape \[3\]; in a decode step it must be None"),
        (replace(is_chunked_prefill=False, qo_indptr=None), "qo_indptr_host is present with .* it must be None"),
        (replace(is_prefill=1), "is_prefill is 1; it must be a bool"),
        (replace(max_query_len=2), "max_query_len is 2; the longest in qo_indptr is 3"),
        (replace(max_seq_len=7), "max_seq_len is 7; the longest in kv_cu_seq_lens is 6"),
        (replace(max_seq_len=6.0), "max_seq_len is 6.0; it must be an int"),
        (replace(kv_seq_lens=torch.tensor([6, 4], dtype=torch.int32)), "kv_seq_lens is .6, 4.; the offsets give"),
        (replace(block_table=torch.tensor([[4, 2], [9, 1]], dtype=torch.int32)), r"block_table\[1\] is \[9, 1\]"),
    ],
)
def test_corruption_is_named(corrupt: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(corrupt(MIXED))


def test_two_sequences_that_write_one_slot_are_named() -> None:
    step = build_attention_metadata([1, 1], [6, 6], [[4, 2], [9, 2]], PAGE_SIZE)
    with pytest.raises(ValueError, match=r"slot_mapping\[1\] is 9; sequences 0 and 1 both write it"):
        check(step, num_tokens=2)


def test_rows_after_the_last_sequence_must_write_nothing() -> None:
    padded = dataclasses.replace(MIXED, slot_mapping=torch.cat([MIXED.slot_mapping, torch.tensor([-1, 3]).int()]))
    with pytest.raises(ValueError, match=r"slot_mapping\[5\] is 3; a row after the last sequence must have -1"):
        check(padded, num_tokens=6)


def test_a_decode_step_has_one_token_per_sequence() -> None:
    step = dataclasses.replace(DECODE, slot_mapping=torch.tensor([9, 12, 13], dtype=torch.int32))
    with pytest.raises(ValueError, match="a decode step has one token per sequence: 3 tokens, 2 sequences"):
        check(step, num_tokens=3)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"positions": [3, 4, 5, 0]}, r"positions\[3\] is 0; sequence 1, of KV length 5, has position 4 there"),
        ({"positions": [3, 4, 5]}, "positions has 3 entries; T is 4"),
        ({"logits_indices": [2, 4]}, r"logits_indices\[1\] is 4; the step has rows 0 to 3"),
        ({"logits_indices": [-1]}, r"logits_indices\[0\] is -1; the step has rows 0 to 3"),
    ],
)
def test_positions_and_logits_indices_are_checked(inputs: dict[str, list[int]], message: str) -> None:
    limits = {"num_tokens": 4, "num_seqs": 2, "num_pages": NUM_PAGES, "page_size": PAGE_SIZE}
    legal = {"positions": [3, 4, 5, 4], "logits_indices": [2, 3]}
    validate(MIXED, **limits, **{name: torch.tensor(values) for name, values in legal.items()})
    with pytest.raises(ValueError, match=message):
        validate(MIXED, **limits, **{name: torch.tensor(values) for name, values in inputs.items()})


def test_padding_has_position_0() -> None:
    """An empty decode row, and rows of T beyond the last sequence's tokens."""
    empty = dataclasses.replace(
        build_attention_metadata([0, 1], [0, 5], [[], [9, 3]], PAGE_SIZE),
        slot_mapping=torch.tensor([-1, 12], dtype=torch.int32),
        max_query_len=1,
        is_chunked_prefill=False,
        qo_indptr=None,
        qo_indptr_host=None,
    )
    padded = dataclasses.replace(MIXED, slot_mapping=torch.cat([MIXED.slot_mapping, torch.tensor([-1]).int()]))
    for step, positions, row in ((empty, [0, 4], 0), (padded, [3, 4, 5, 4, 0], 4)):
        limits = {"num_tokens": len(positions), "num_seqs": 2, "num_pages": NUM_PAGES, "page_size": PAGE_SIZE}
        validate(step, **limits, positions=torch.tensor(positions))
        positions[row] = 7
        with pytest.raises(ValueError, match=rf"positions\[{row}\] is 7; a padded row has position 0"):
            validate(step, **limits, positions=torch.tensor(positions))


@pytest.mark.parametrize("step", [MIXED, DECODE], ids=["mixed", "decode"])
def test_check_present_names_the_absent_field(step: BuiltAttentionMetadata) -> None:
    check_present(step)
    for field in FIELDS:
        value = getattr(step, field.name)
        if isinstance(value, torch.Tensor):
            lacking = dataclasses.replace(step, **{field.name: None})
            with pytest.raises(ValueError, match=f"{field.name} is None; it must be a tensor in this step"):
                check_present(lacking)
