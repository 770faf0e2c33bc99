"""Builds step metadata from plain lists: the reference for tests and tools. A C++ host has its own builder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from .built import BuiltAttentionMetadata


def build_attention_metadata(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    page_tables: Sequence[Sequence[int]],
    page_size: int,
    device: torch.device | str = "cpu",
    *,
    state_slots: Sequence[int] | None = None,
    state_write_slots: Sequence[int] | None = None,
    group_page_tables: Sequence[Sequence[Sequence[int]]] | None = None,
) -> BuiltAttentionMetadata:
    """Builds the metadata of one step.

    Args:
        q_lens: number of this step's tokens per sequence, B integers.
        kv_lens: KV length per sequence, including this step's tokens, B integers.
        page_tables: page indices per sequence: at least ceil(kv_len / page_size); further ones are ignored.
        page_size: tokens per page.
        state_slots: state slot per sequence, -1 for none; for models with state layers.
        state_write_slots: slot that each new state goes to, where that is another one.
        group_page_tables: `page_tables` of KV cache groups 1 to G, for hosts that free the pages of sliding windows. A
            freed page has any index of the group.
        device: device of the device tensors. Host mirrors are pinned when this is a CUDA device.

    The step is decode when every sequence has exactly one token, also when there is no sequence. Else it is prefill
    when no sequence has a prefix, and chunked prefill when one has.

    Raises:
        ValueError: lengths that contradict each other, or too few pages; names the sequence, value and limit.
    """
    _check_inputs(q_lens, kv_lens, page_tables, page_size)
    for name, slots_of in (("state_slots", state_slots), ("state_write_slots", state_write_slots)):
        if slots_of is not None and len(slots_of) != len(q_lens):
            raise ValueError(f"{name} has {len(slots_of)} entries; the step has {len(q_lens)} sequences")
    page_counts = [-(-kv_len // page_size) for kv_len in kv_lens]
    for tables in group_page_tables or ():
        _check_inputs(q_lens, kv_lens, tables, page_size)
    all_slots, all_indices = [], []  # by KV cache group
    for tables in (page_tables, *(group_page_tables or ())):
        slots: list[int] = []
        for q_len, kv_len, table in zip(q_lens, kv_lens, tables, strict=True):
            slots += [table[p // page_size] * page_size + p % page_size for p in range(kv_len - q_len, kv_len)]
        all_slots.append(slots)
        all_indices.append([page for table, n in zip(tables, page_counts, strict=True) for page in table[:n]])
    last_page_lens = [(kv_len - 1) % page_size + 1 if kv_len else 0 for kv_len in kv_lens]

    prefix_lens = [kv_len - q_len for q_len, kv_len in zip(q_lens, kv_lens, strict=True)]
    is_decode = all(q_len == 1 for q_len in q_lens)
    is_prefill = not is_decode and list(q_lens) == list(kv_lens)

    device = torch.device(device)
    pages_host = _host_tensor([0, *accumulate(page_counts)], device)
    last_host = _host_tensor(last_page_lens, device)
    kv_host = _host_tensor([0, *accumulate(kv_lens)], device)
    qo_host = None if is_decode else _host_tensor([0, *accumulate(q_lens)], device)
    return BuiltAttentionMetadata(
        slot_mapping=_host_tensor(all_slots[0], device).to(device),
        paged_kv_indptr=pages_host.to(device),
        paged_kv_indices=_host_tensor(all_indices[0], device).to(device),
        paged_kv_last_page_len=last_host.to(device),
        kv_cu_seq_lens=kv_host.to(device),
        qo_indptr=None if qo_host is None else qo_host.to(device),
        kv_seq_lens_host=kv_host,
        paged_kv_indptr_host=pages_host,
        paged_kv_last_page_len_host=last_host,
        qo_indptr_host=qo_host,
        max_query_len=max(q_lens, default=0),
        max_seq_len=max(kv_lens, default=0),
        is_prefill=is_prefill,
        is_chunked_prefill=not is_decode and not is_prefill,
        linear_state_indices=None if state_slots is None else _host_tensor(state_slots, device).to(device),
        linear_state_write_indices=(
            None if state_write_slots is None else _host_tensor(state_write_slots, device).to(device)
        ),
        has_initial_state=(None if state_slots is None else _host_tensor(prefix_lens, device).to(device, torch.bool)),
        group_slot_mapping=_host_tensor(all_slots[1:], device).to(device) if group_page_tables else None,
        group_paged_kv_indices=_host_tensor(all_indices[1:], device).to(device) if group_page_tables else None,
    )


def _host_tensor(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")


def _check_inputs(
    q_lens: Sequence[int], kv_lens: Sequence[int], page_tables: Sequence[Sequence[int]], page_size: int
) -> None:
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}; it must be at least 1")
    if not len(q_lens) == len(kv_lens) == len(page_tables):
        raise ValueError(
            f"q_lens, kv_lens and page_tables have {len(q_lens)}, {len(kv_lens)} and {len(page_tables)} entries; "
            "each must have one per sequence"
        )
    for i, (q_len, kv_len, table) in enumerate(zip(q_lens, kv_lens, page_tables, strict=True)):
        if not 0 <= q_len <= kv_len:
            raise ValueError(f"sequence {i}: q_len {q_len} must be between 0 and its kv_len {kv_len}")
        need = -(-kv_len // page_size)
        if len(table) < need:
            raise ValueError(
                f"sequence {i}: kv_len {kv_len} needs {need} pages of {page_size}, its page table has {len(table)}"
            )
        if any(page < 0 for page in table[:need]):
            raise ValueError(f"sequence {i}: page index {min(table[:need])} is negative")
