"""Checks slot mappings against page tables, for `validation`: of the main table, and of KV cache groups."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from .protocol import AttentionMetadata


def check_slots(
    values: dict[str, list[int]],
    q_lens: list[int],
    page_size: int,
    num_pages: int | None,
    names: tuple[str, str] = ("slot_mapping", "paged_kv_indices"),
) -> None:
    """Checks a slot mapping against its page indices; `names` are those of the error messages."""
    slots_name, indices_name = names
    slots, indptr = values["slot_mapping"], values["paged_kv_indptr"]
    for t, slot in enumerate(slots):
        if num_pages is not None and not -1 <= slot < num_pages * page_size:
            raise ValueError(f"{slots_name}[{t}] is {slot}; it must be -1 to {num_pages * page_size - 1}")
    kv_lens = [high - low for low, high in pairwise(values["kv_cu_seq_lens"])]
    writer: dict[int, int] = {}
    t = 0
    for i, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        pages = values["paged_kv_indices"][indptr[i] : indptr[i + 1]]
        for position in range(kv_len - q_len, kv_len):
            expected = -1
            if position >= 0:  # a decode row of KV length 0 writes nothing
                expected = pages[position // page_size] * page_size + position % page_size
            if slots[t] != expected:
                raise ValueError(
                    f"{slots_name}[{t}] is {slots[t]}; by {indices_name}, position {position} of sequence {i} has "
                    f"slot {expected}"
                )
            if expected >= 0 and writer.setdefault(expected, i) != i:
                raise ValueError(f"{slots_name}[{t}] is {expected}; sequences {writer[expected]} and {i} both write it")
            t += 1
    for row in range(t, len(slots)):
        if slots[row] != -1:
            raise ValueError(f"{slots_name}[{row}] is {slots[row]}; a row after the last sequence must have -1")


def check_groups(
    metadata: AttentionMetadata,
    values: dict[str, list[int]],
    q_lens: list[int],
    page_size: int,
    group_num_pages: Sequence[int] | None,
) -> None:
    """Checks the page tables of KV cache groups 1 to G; `group_num_pages` as in `validate`."""
    slots, indices = metadata.group_slot_mapping, metadata.group_paged_kv_indices
    if slots is None and indices is None and group_num_pages is None:
        return
    if slots is None or indices is None:
        name = "group_slot_mapping" if slots is None else "group_paged_kv_indices"
        raise ValueError(f"{name} is None; a step with page tables of KV cache groups must have it")
    sizes: list[int | None] = [None] * slots.shape[0] if group_num_pages is None else [*group_num_pages]
    for name, tensor, second in (
        ("group_slot_mapping", slots, slots.shape[1]),
        ("group_paged_kv_indices", indices, len(values["paged_kv_indices"])),
    ):
        if tuple(tensor.shape) != (len(sizes), second):
            raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be [{len(sizes)}, {second}]")
    for group, num_pages in enumerate(sizes):
        names = (f"group_slot_mapping[{group}]", f"group_paged_kv_indices[{group}]")
        of_group = values | {"slot_mapping": slots[group].tolist(), "paged_kv_indices": indices[group].tolist()}
        for i, page in enumerate(of_group["paged_kv_indices"]):
            if page < 0 or (num_pages is not None and page >= num_pages):
                allowed = "at least 0" if num_pages is None else f"0 to {num_pages - 1}"
                raise ValueError(f"{names[1]}[{i}] is {page}; a page of KV cache group {group + 1} is {allowed}")
        check_slots(of_group, q_lens, page_size, num_pages, names)
