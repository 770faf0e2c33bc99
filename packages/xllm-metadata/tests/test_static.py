"""Static buffers: filled in place, padded as the table says; steps that do not fit are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from xllm_metadata import (
    FIELDS,
    AttentionMetadata,
    MemorySpace,
    Padding,
    StaticAttentionMetadata,
    build_attention_metadata,
    validate,
)


def make_static(**extra: object) -> StaticAttentionMetadata:
    return StaticAttentionMetadata(
        max_num_tokens=16,
        max_num_seqs=8,
        max_num_pages=32,
        device="cpu",
        **extra,  # type: ignore[arg-type]
    )


MIXED = build_attention_metadata([3, 1], [6, 5], [[4, 2], [9, 3]], page_size=4)
DECODE = build_attention_metadata([1, 1, 1], [6, 5, 1], [[4, 2], [9, 3], [1]], page_size=4)


def test_padding_rows_follow_the_table() -> None:
    static = make_static()
    for name in [field.name for field in FIELDS if field.type.is_tensor]:
        try:
            static.buffer(name).fill_(77)  # as an earlier, larger step might have left
        except KeyError:
            assert getattr(static, name) is None
    static.fill(MIXED, num_tokens=8, num_seqs=4)
    for field in FIELDS:
        live = getattr(MIXED, field.name)
        padded = getattr(static, field.name)
        if not isinstance(live, torch.Tensor):
            assert padded == live
            continue
        rows = live.shape[0]
        assert padded[:rows].tolist() == live.tolist()
        tail = set(padded[rows:].tolist())
        expected = {
            Padding.REPEAT_LAST: {live[-1].item()},
            Padding.ZERO: {0},
            Padding.MINUS_ONE: {-1},
            Padding.UNTOUCHED: {77},
        }[field.padding]
        assert tail == expected, field.name


@pytest.mark.parametrize("num_padding", [1, 15, 16, 17, 40])
def test_tails_of_offsets_of_any_length(num_padding: int) -> None:
    """Short tails are copied in the batch, long ones after it."""
    size = 3 + num_padding
    static = StaticAttentionMetadata(max_num_tokens=size, max_num_seqs=size, max_num_pages=64, device="cpu")
    for lens in ([6, 5, 1], [3, 2, 9]):
        step = build_attention_metadata([1] * 3, lens, [[4, 2, 1], [9, 3, 5], [1, 7, 8]], page_size=4)
        static.fill(step, num_tokens=size, num_seqs=size)
        for name in ("kv_cu_seq_lens", "paged_kv_indptr", "kv_seq_lens_host", "paged_kv_indptr_host"):
            live = getattr(step, name).tolist()
            assert getattr(static, name).tolist() == live + live[-1:] * num_padding, name


def test_host_fields_can_be_filled_later() -> None:
    """Until then they have this step's sizes and old values. A later fill replaces one that was never completed."""
    static, whole = make_static(), make_static()
    host = [field.name for field in FIELDS if field.type.is_tensor and field.memory is MemorySpace.HOST]
    static.fill(DECODE, num_tokens=4, num_seqs=4)
    for step, size in ((build_attention_metadata([1], [2], [[5]], page_size=4), 2), (MIXED, 6)):
        before = {name: static.buffer(name).tolist() for name in host if getattr(whole, name, None) is not None}
        static.fill(step, num_tokens=size, num_seqs=size, host=False)
        whole.fill(step, num_tokens=size, num_seqs=size)
        assert {name: static.buffer(name).tolist() for name in before} == before
        assert static.kv_seq_lens_host.shape == (size + 1,)
        for _ in range(2):  # the second call does nothing
            static.fill_host()
            assert all(torch.equal(getattr(static, name), getattr(whole, name)) for name in before)
    static.fill(DECODE, num_tokens=4, num_seqs=4, host=False)
    static.fill(MIXED, num_tokens=6, num_seqs=6)
    static.fill_host()
    assert torch.equal(static.kv_seq_lens_host, whole.kv_seq_lens_host)


def test_buffers_made_in_inference_mode_are_filled_outside() -> None:
    step = build_attention_metadata([2, 1], [2, 3], [[0], [1]], page_size=4)
    with torch.inference_mode():
        static = make_static()
        static.fill(step, num_tokens=4, num_seqs=3)
    static.fill(step, num_tokens=4, num_seqs=3)
    assert static.kv_cu_seq_lens.tolist() == [0, 2, 5, 5]
    assert not torch.is_inference(static.buffer("slot_mapping"))


def test_equal_sizes_give_equal_addresses() -> None:
    static = make_static()
    pointers = []
    for step in (DECODE, build_attention_metadata([1], [2], [[5]], page_size=4)):
        static.fill(step, num_tokens=4, num_seqs=4)
        pointers.append([getattr(static, f.name).data_ptr() for f in FIELDS if getattr(static, f.name) is not None
                         and f.type.is_tensor])  # fmt: skip
    assert pointers[0] == pointers[1]
    assert static.paged_kv_indices.shape == (32,)


def test_a_smaller_step_after_a_larger_one_is_clean() -> None:
    static = make_static()
    static.fill(MIXED, num_tokens=16, num_seqs=8)
    small = build_attention_metadata([1], [2], [[5]], page_size=4)
    static.fill(small, num_tokens=2, num_seqs=2)
    assert static.slot_mapping.tolist() == [5 * 4 + 1, -1]
    assert static.paged_kv_last_page_len.tolist() == [2, 0]
    assert static.kv_seq_lens_host.tolist() == [0, 2, 2]
    assert static.qo_indptr is None
    assert static.qo_indptr_host is None


def test_a_padded_decode_step_is_a_valid_step() -> None:
    static = make_static()
    static.fill(DECODE, num_tokens=4, num_seqs=4)
    live = static.paged_kv_indices[: int(static.paged_kv_indptr_host[-1])]
    step = dataclasses.replace(DECODE, **{f.name: getattr(static, f.name) for f in FIELDS})
    step = dataclasses.replace(step, paged_kv_indices=live)
    validate(step, num_tokens=4, num_seqs=4, num_pages=16, page_size=4)


def test_optional_fields_are_held_only_when_asked_for() -> None:
    step = dataclasses.replace(MIXED, block_table=torch.tensor([[4, 2], [9, 3]], dtype=torch.int32))
    static = make_static()
    static.fill(step, num_tokens=8, num_seqs=4)
    assert static.block_table is None
    static = make_static(optional=["block_table"], max_pages_per_seq=3)
    static.buffer("block_table").fill_(77)
    static.fill(step, num_tokens=8, num_seqs=4)
    assert static.block_table is not None
    assert static.block_table.tolist() == [[4, 2, 0], [9, 3, 0], [0, 0, 0], [0, 0, 0]]


def grouped_step(q_lens: list[int], kv_lens: list[int], num_groups: int = 2) -> AttentionMetadata:
    tables = [[[8 * i + j + group for j in range(-(-n // 4))] for i, n in enumerate(kv_lens)] for group in range(3)]
    return build_attention_metadata(
        q_lens, kv_lens, tables[0], page_size=4, group_page_tables=tables[1 : 1 + num_groups]
    )


GROUP_FIELDS = ["group_slot_mapping", "group_paged_kv_indices"]


@pytest.mark.parametrize("phase", ["chunked", "decode"])
def test_tables_of_kv_cache_groups_are_padded_like_those_of_group_0(phase: str) -> None:
    static = make_static(optional=GROUP_FIELDS, num_group_tables=2)
    large = grouped_step([1] * 7, [6, 5, 1, 8, 9, 2, 3])
    small = grouped_step([3, 1] if phase == "chunked" else [1, 1], [6, 5])
    static.fill(large, num_tokens=8, num_seqs=8)
    for name in GROUP_FIELDS:
        static.buffer(name).fill_(77)
    static.fill(small, num_tokens=8, num_seqs=8)
    assert static.group_slot_mapping is not None
    assert static.group_paged_kv_indices is not None
    assert small.group_slot_mapping is not None
    assert small.group_paged_kv_indices is not None
    num_tokens = small.slot_mapping.shape[0]
    for group in range(2):
        row = static.group_slot_mapping[group]
        assert row.tolist() == small.group_slot_mapping[group].tolist() + [-1] * (8 - num_tokens)
        assert row.is_contiguous()
        pages = static.group_paged_kv_indices[group]
        assert pages.tolist() == small.group_paged_kv_indices[group].tolist() + [77] * 28
    before = static.group_slot_mapping.data_ptr(), static.group_paged_kv_indices.data_ptr()
    static.fill(small, num_tokens=8, num_seqs=8)
    assert (static.group_slot_mapping.data_ptr(), static.group_paged_kv_indices.data_ptr()) == before


def test_another_number_of_kv_cache_groups_is_refused() -> None:
    static = make_static(optional=GROUP_FIELDS, num_group_tables=2)
    with pytest.raises(ValueError, match=r"group_slot_mapping has shape \[1, 2\]; .* has \[2, 2\]"):
        static.fill(grouped_step([1, 1], [6, 5], 1), num_tokens=4, num_seqs=4)


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "message"),
    [
        (3, 4, "slot_mapping: T is 4 in the step, 3 after padding, 16 at most"),
        (17, 4, "slot_mapping: T is 4 in the step, 17 after padding, 16 at most"),
        (8, 1, r"paged_kv_indptr: B\+1 is 3 in the step, 2 after padding, 9 at most"),
        (8, 9, r"paged_kv_indptr: B\+1 is 3 in the step, 10 after padding, 9 at most"),
    ],
)
def test_sizes_that_do_not_fit_change_nothing(num_tokens: int, num_seqs: int, message: str) -> None:
    static = make_static()
    static.fill(DECODE, num_tokens=4, num_seqs=4)
    before = {f.name: static.buffer(f.name).clone() for f in FIELDS[:10]}
    with pytest.raises(ValueError, match=message):
        static.fill(MIXED, num_tokens=num_tokens, num_seqs=num_seqs)
    assert all(torch.equal(static.buffer(name), buffer) for name, buffer in before.items())


def test_an_optional_field_that_the_step_lacks_is_none() -> None:
    """The buffer keeps its address for the next step that has the field."""
    static = make_static(optional=["kv_seq_lens"])
    with_field = dataclasses.replace(DECODE, kv_seq_lens=DECODE.kv_cu_seq_lens.diff())
    static.fill(with_field, num_tokens=4, num_seqs=4)
    assert static.kv_seq_lens is not None
    address = static.kv_seq_lens.data_ptr()
    static.fill(DECODE, num_tokens=4, num_seqs=4)
    assert static.kv_seq_lens is None
    static.fill(with_field, num_tokens=4, num_seqs=4)
    assert static.kv_seq_lens is not None
    assert static.kv_seq_lens.data_ptr() == address


def test_too_many_pages_and_missing_fields_are_named() -> None:
    small = StaticAttentionMetadata(max_num_tokens=16, max_num_seqs=8, max_num_pages=3, device="cpu")
    with pytest.raises(ValueError, match="paged_kv_indices: P is 4 in the step, 3 after padding, 3 at most"):
        small.fill(MIXED, num_tokens=8, num_seqs=4)
    with pytest.raises(ValueError, match="qo_indptr is None; this step must have it"):
        make_static().fill(dataclasses.replace(MIXED, qo_indptr=None), num_tokens=8, num_seqs=4)
    with pytest.raises(ValueError, match=r"no static buffers for optional fields .'nope'."):
        make_static(optional=["nope"])
    with pytest.raises(ValueError, match=r"no static buffers for optional fields .'dp_is_decode'."):
        make_static(optional=["block_table", "dp_is_decode"])  # sized by the number of data-parallel ranks
    with pytest.raises(ValueError, match="capacity of B is 0"):
        StaticAttentionMetadata(max_num_tokens=1, max_num_seqs=0, max_num_pages=1, device="cpu")


def test_extra_copies_join_the_fill() -> None:
    static = make_static()
    target, source = torch.zeros(3, dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    static.fill(DECODE, num_tokens=4, num_seqs=4, extra_copies=[(target, source)])
    assert target.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="slot_mapping"):
        static.fill(DECODE, num_tokens=2, num_seqs=2, extra_copies=[(target, source + 1)])
    assert target.tolist() == [0, 1, 2]


def test_attributes_are_those_of_the_last_step() -> None:
    """Steps with and without the fields that decode lacks, of equal and other sizes, alternate."""
    static = make_static()
    for step, size in ((MIXED, 4), (DECODE, 4), (MIXED, 4), (DECODE, 3), (DECODE, 4)):
        static.fill(step, num_tokens=size, num_seqs=size)
        assert (static.qo_indptr is None) == (step is DECODE)
        assert static.q_cu_seq_lens is static.qo_indptr
        assert static.kv_seq_lens_host.shape == (size + 1,)


def contents(static: StaticAttentionMetadata) -> dict[str, object]:
    """All attributes, and the whole buffers."""
    seen: dict[str, object] = {}
    for field in FIELDS:
        value = getattr(static, field.name)
        seen[field.name] = value.tolist() if isinstance(value, torch.Tensor) else value
        if isinstance(value, torch.Tensor):
            seen[f"buffer of {field.name}"] = static.buffer(field.name).tolist()
    return seen


def optional_step(q_lens: list[int], kv_lens: list[int], width: int) -> AttentionMetadata:
    """A step with a page table [B, width], a variable-length field: T and B do not determine its shape."""
    tables = [[8 * i + j for j in range(width)] for i in range(len(q_lens))]
    step = build_attention_metadata(q_lens, kv_lens, tables, page_size=4)
    return dataclasses.replace(step, block_table=torch.tensor(tables, dtype=torch.int32).reshape(len(q_lens), width))


def test_a_step_is_filled_as_if_it_were_the_first() -> None:
    """Earlier steps leave no trace: steps of other sizes, phases and widths, valid or refused."""
    optional = {"optional": ["block_table"], "max_pages_per_seq": 4}
    steps = [
        optional_step(q_lens, kv_lens, width)
        for width in (2, 4, 3)
        for q_lens, kv_lens in (([1, 1], [6, 3]), ([1, 1], [2, 1]), ([2, 1], [6, 3]), ([1], [7]), ([3], [3]), ([], []))
    ]
    refused = [
        (dataclasses.replace(steps[0], kv_cu_seq_lens=None), "kv_cu_seq_lens is None"),
        (dataclasses.replace(steps[2], qo_indptr_host=None), "qo_indptr_host is None"),
        (dataclasses.replace(steps[0], is_chunked_prefill=True), "qo_indptr is None"),
        (
            dataclasses.replace(steps[0], kv_seq_lens_host=torch.zeros(4, dtype=torch.int32)),
            "kv_seq_lens_host has shape",
        ),
        (dataclasses.replace(steps[0], paged_kv_indices=torch.zeros(33, dtype=torch.int32)), "P is 33 in the step"),
    ]
    static = make_static(**optional)
    for number, index in enumerate(torch.randint(len(steps), (200,), generator=torch.manual_seed(0)).tolist()):
        size = 4 if number % 3 else 3
        fresh = make_static(**optional)
        for one in (static, fresh):
            for buffer in one._buffers.by_name.values():
                buffer.fill_(7)
            one.fill(steps[index], num_tokens=size, num_seqs=size)
        assert contents(static) == contents(fresh)
        before = contents(static)
        step, message = refused[number % len(refused)]
        target = torch.zeros(1, dtype=torch.int32)
        with pytest.raises(ValueError, match=message):
            static.fill(step, num_tokens=size, num_seqs=size, extra_copies=[(target, target + 1)])
        assert contents(static) == before
        assert target.tolist() == [0]
