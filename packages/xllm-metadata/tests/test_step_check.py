"""check_step: the faults that shapes, devices and host mirrors show, and that it agrees with validate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xllm_metadata import FIELDS, MemorySpace, StaticAttentionMetadata, build_attention_metadata, check_step, validate

CPU = torch.device("cpu")


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step(**changes: Any) -> Any:
    """KV lengths 6 and 5 in pages of 4."""
    built = build_attention_metadata([3, 1], [6, 5], [[4, 2], [9, 3]], page_size=4)
    return replace(built, **changes)


FAULTS: list[tuple[dict[str, Any], str]] = [
    (
        {"paged_kv_indptr_host": ints(0, 1, 3)},
        r"paged_kv_indptr_host gives sequence 0 1 pages of 4; its KV length 6 in kv_seq_lens_host needs 2",
    ),
    ({"paged_kv_indptr_host": ints(0, 2, 3)}, "gives sequence 1 1 pages of 4; its KV length 5"),
    ({"paged_kv_indptr_host": ints(0, 3, 5)}, "gives sequence 0 3 pages of 4; its KV length 6"),
    # Consistent with the KV length, but no page holds so many tokens.
    (
        {"paged_kv_indptr_host": ints(0, 1, 3), "paged_kv_last_page_len_host": ints(6, 1)},
        "gives sequence 0 1 pages of 4",
    ),
    ({"paged_kv_last_page_len_host": ints(2, 2)}, r"paged_kv_last_page_len_host\[1\] is 2; KV length 5.* leaves 1"),
    ({"paged_kv_last_page_len_host": ints(0, 1)}, r"paged_kv_last_page_len_host\[0\] is 0; KV length 6"),
    ({"kv_seq_lens_host": ints(0, 6, 9)}, "gives sequence 1 2 pages of 4; its KV length 3"),
    ({"kv_seq_lens_host": ints(0, 11, 6)}, "its KV length -5 in kv_seq_lens_host needs 0|its KV length 11"),
    ({"kv_seq_lens_host": ints(0, 6)}, "kv_seq_lens_host has 2 entries, paged_kv_indptr_host 3"),
    ({"paged_kv_last_page_len_host": ints(2)}, "paged_kv_last_page_len_host 1; they must be"),
    # Each gives every sequence as many pages and tokens as it needs, if only the first offset is 0.
    ({"kv_seq_lens_host": ints(1, 6, 11)}, "kv_seq_lens_host starts at 1; it must start at 0"),
    ({"paged_kv_indptr_host": ints(-1, 2, 4)}, "paged_kv_indptr_host starts at -1; it must start at 0"),
    ({"qo_indptr_host": ints(1, 3, 4)}, "qo_indptr_host starts at 1; it must start at 0"),
    ({"qo_indptr_host": ints()}, "qo_indptr_host has no entries; it must start at 0"),
    ({"paged_kv_indices": ints(4, 2, 9)}, "paged_kv_indptr_host ends at 4; paged_kv_indices has 3 entries"),
    ({"max_seq_len": 5}, "max_seq_len is 5; kv_seq_lens_host has a sequence of KV length 6"),
    ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, r"block_table has shape \[2, 1\].*2 sequences of up to 2"),
    ({"block_table": torch.zeros(1, 2, dtype=torch.int32)}, r"block_table has shape \[1, 2\]"),
    ({"block_table": torch.zeros(2, 2, dtype=torch.int32, device="meta")}, "block_table is on device meta"),
]


GROUPS = {
    "group_slot_mapping": torch.zeros((2, 4), dtype=torch.int32),
    "group_paged_kv_indices": torch.zeros((2, 4), dtype=torch.int32),
}


@pytest.mark.parametrize("name", GROUPS)
def test_tables_of_kv_cache_groups(name: str) -> None:
    check_step(step(), 4, CPU)
    check_step(step(**GROUPS), 4, CPU, 2)
    for wrong, message in (
        (None, f"{name} is None; the backend serves 2 KV cache groups besides group 0"),
        (torch.zeros((2, 4), device="meta"), f"{name} is on device meta; it must be on cpu"),
        (torch.zeros((1, 4)), rf"{name} has shape \[1, 4\]; it must be \[2, 4\]"),
        (torch.zeros((2, 3)), rf"{name} has shape \[2, 3\]; it must be \[2, 4\]"),
        (torch.zeros(8), rf"{name} has shape \[8\]; it must be \[2, 4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            check_step(step(**GROUPS | {name: wrong}), 4, CPU, 2)


@pytest.mark.parametrize(("changes", "message"), FAULTS)
def test_a_fault_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_step(step(**changes), 4, CPU)


@pytest.mark.parametrize(
    "name",
    [field.name for field in FIELDS if field.memory is not MemorySpace.NONE and field.presence.value != "optional"],
)
def test_a_field_on_another_device_is_named(name: str) -> None:
    built = step()
    moved = replace(built, **{name: getattr(built, name).to("meta")})
    with pytest.raises(ValueError, match=f"{name} is on device meta; it must be on cpu"):
        check_step(moved, 4, CPU)


def test_pages_of_another_size_than_the_cache_are_refused() -> None:
    with pytest.raises(ValueError, match="gives sequence 0 2 pages of 8; its KV length 6"):
        check_step(step(), 8, CPU)
    with pytest.raises(ValueError, match="gives sequence 0 2 pages of 2; its KV length 6"):
        check_step(step(), 2, CPU)


def test_empty_rows_and_empty_steps_pass() -> None:
    check_step(build_attention_metadata([], [], [], page_size=4), 4, CPU)
    check_step(build_attention_metadata([0, 1, 0], [0, 5, 0], [[], [0, 1], []], page_size=4), 4, CPU)
    padded = StaticAttentionMetadata(max_num_tokens=4, max_num_seqs=4, max_num_pages=8, device="cpu")
    padded.fill(build_attention_metadata([1], [5], [[0, 1]], page_size=4), num_tokens=4, num_seqs=4)
    check_step(padded, 4, CPU)
    check_step(step(block_table=torch.zeros(2, 3, dtype=torch.int32)), 4, CPU)
    empty = build_attention_metadata([0], [0], [[]], page_size=4)
    with pytest.raises(ValueError, match=r"paged_kv_last_page_len_host\[0\] is 4; KV length 0"):
        check_step(replace(empty, paged_kv_last_page_len_host=ints(4)), 4, CPU)


@given(
    lens=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), max_size=6),
    page_size=st.integers(1, 6),
    change=st.none()
    | st.tuples(
        st.sampled_from(("kv_seq_lens", "paged_kv_indptr", "last", "first query")),
        st.integers(0, 6),
        st.sampled_from((-1, 1)),
    ),
)
def test_it_refuses_what_validate_refuses(
    lens: list[tuple[int, int]], page_size: int, change: tuple[str, int, int] | None
) -> None:
    """The same fault in the device tensor and its mirror: both checks find it, or neither does."""
    kv_lens = [q + prefix for q, prefix in lens]
    built = build_attention_metadata(
        [q for q, _ in lens], kv_lens, [list(range(23 * i, 23 * i + 23)) for i in range(len(lens))], page_size=page_size
    )
    if change is not None:
        which, index, by = change
        host, device = {
            "kv_seq_lens": ("kv_seq_lens_host", "kv_cu_seq_lens"),
            "paged_kv_indptr": ("paged_kv_indptr_host", "paged_kv_indptr"),
            "last": ("paged_kv_last_page_len_host", "paged_kv_last_page_len"),
            "first query": ("qo_indptr_host", "qo_indptr"),
        }[which]
        values = getattr(built, host)
        if values is not None and index < (1 if which == "first query" else values.shape[0]):
            values = values.clone()
            values[index] += by
            built = replace(built, **{host: values, device: values.clone()})
    sizes = {"num_tokens": sum(q for q, _ in lens), "num_seqs": len(lens), "num_pages": 200, "page_size": page_size}

    def refuses(check: Any) -> bool:
        try:
            check()
        except ValueError:
            return True
        return False

    assert refuses(lambda: check_step(built, page_size, CPU)) == refuses(lambda: validate(built, **sizes))
