"""Checks of every step, in production too: devices, and the page tables as far as host mirrors and shapes show them.

`check_step` reads no device value and never waits for the device. `validate` checks all rules of the contract.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from .fields import FIELDS
from .protocol import AttentionMetadata
from .schema import MemorySpace


def check_step(metadata: AttentionMetadata, page_size: int, device: torch.device, num_group_tables: int = 0) -> None:
    """Checks the devices of a step's fields, and its page tables against its KV lengths.

    Per sequence: the number of pages and the tokens in the last one give the KV length, and no KV length exceeds
    `max_seq_len`. The offsets of the host mirrors start at 0. `paged_kv_indices` and `block_table` are long enough.

    Args:
        metadata: the step's, before padding.
        page_size: tokens per page of the bound caches.
        device: of the device fields. Optional fields other than `block_table` and those of KV cache groups are not
            checked.
        num_group_tables: G, the KV cache groups whose tables the step must have; 0: those fields are not read.

    Raises:
        ValueError: names the field, its value and the limit.
    """
    kv_offsets, page_offsets = metadata.kv_seq_lens_host, metadata.paged_kv_indptr_host
    last_page_lens, indices = metadata.paged_kv_last_page_len_host, metadata.paged_kv_indices
    if not (
        kv_offsets.is_cpu
        and page_offsets.is_cpu
        and last_page_lens.is_cpu
        and indices.device == device
        and metadata.slot_mapping.device == device
        and metadata.paged_kv_indptr.device == device
        and metadata.paged_kv_last_page_len.device == device
        and metadata.kv_cu_seq_lens.device == device
    ):
        _refuse_device(metadata, device)
    if metadata.is_prefill or metadata.is_chunked_prefill:
        queries, queries_host = metadata.qo_indptr, metadata.qo_indptr_host
        if queries is not None and queries.device != device:
            _refuse_device(metadata, device)
        if queries_host is not None:
            _check_query_offsets(queries_host, metadata, device)
    kv, pages, last = kv_offsets.tolist(), page_offsets.tolist(), last_page_lens.tolist()
    if len(kv) != len(last) + 1 or len(pages) != len(kv):
        raise ValueError(
            f"kv_seq_lens_host has {len(kv)} entries, paged_kv_indptr_host {len(pages)} and "
            f"paged_kv_last_page_len_host {len(last)}; they must be B + 1, B + 1 and B"
        )
    if kv[0] or pages[0]:
        name, offsets = ("kv_seq_lens_host", kv) if kv[0] else ("paged_kv_indptr_host", pages)
        raise ValueError(f"{name} starts at {offsets[0]}; it must start at 0")
    # A plain loop: at these sizes it takes less time than tensor ops.
    longest = metadata.max_seq_len
    kv_begin = first_page = 0
    for kv_end, end_page, last_len in zip(kv[1:], pages[1:], last, strict=True):
        kv_len = kv_end - kv_begin
        # Without the first condition a sequence without a page and with a full last page would pass.
        if kv_len <= 0 or kv_len != (end_page - first_page - 1) * page_size + last_len or not 0 < last_len <= page_size:
            _check_pages(kv, pages, last, page_size)  # accepts an empty row
        if kv_len > longest:
            raise ValueError(f"max_seq_len is {longest}; kv_seq_lens_host has a sequence of KV length {kv_len}")
        kv_begin, first_page = kv_end, end_page
    if first_page > indices.shape[0]:
        raise ValueError(f"paged_kv_indptr_host ends at {first_page}; paged_kv_indices has {indices.shape[0]} entries")
    if metadata.block_table is not None:
        _check_block_table(metadata.block_table, pages, device)
    if num_group_tables:
        _check_group_tables(metadata, first_page, device, num_group_tables)


def _check_query_offsets(offsets: torch.Tensor, metadata: AttentionMetadata, device: torch.device) -> None:
    if not offsets.is_cpu:
        _refuse_device(metadata, device)
    first = offsets.tolist()[:1]
    if first != [0]:
        found = f"starts at {first[0]}" if first else "has no entries"
        raise ValueError(f"qo_indptr_host {found}; it must start at 0")


def _check_pages(kv: list[int], pages: list[int], last: list[int], page_size: int) -> None:
    """Checks every sequence and names the first fault; the offsets start at 0."""
    kv_begin = first_page = 0
    for i, (kv_end, end_page, last_len) in enumerate(zip(kv[1:], pages[1:], last, strict=True)):
        kv_len, num_pages = kv_end - kv_begin, end_page - first_page
        needed = -(-kv_len // page_size)
        if kv_len < 0 or num_pages != needed:
            raise ValueError(
                f"paged_kv_indptr_host gives sequence {i} {num_pages} pages of {page_size}; its KV length {kv_len} in "
                f"kv_seq_lens_host needs {max(needed, 0)}"
            )
        expected = kv_len - (needed - 1) * page_size if kv_len else 0
        if last_len != expected:
            raise ValueError(
                f"paged_kv_last_page_len_host[{i}] is {last_len}; KV length {kv_len} in pages of {page_size} leaves "
                f"{expected} in the last page"
            )
        kv_begin, first_page = kv_end, end_page


def _check_block_table(table: torch.Tensor, pages: list[int], device: torch.device) -> None:
    most = max((end - begin for begin, end in pairwise(pages)), default=0)
    if table.device != device:
        raise ValueError(f"block_table is on device {table.device}; it must be on {device}")
    if table.dim() != 2 or table.shape[0] != len(pages) - 1 or table.shape[1] < most:
        raise ValueError(
            f"block_table has shape {list(table.shape)}; paged_kv_indptr_host has {len(pages) - 1} sequences of up to "
            f"{most} pages"
        )


def _check_group_tables(
    metadata: AttentionMetadata, num_pages: int, device: torch.device, num_group_tables: int
) -> None:
    num_tokens = metadata.slot_mapping.shape[0]
    for name, tensor, size in (
        ("group_slot_mapping", metadata.group_slot_mapping, num_tokens),
        ("group_paged_kv_indices", metadata.group_paged_kv_indices, num_pages),
    ):
        if tensor is None:
            raise ValueError(f"{name} is None; the backend serves {num_group_tables} KV cache groups besides group 0")
        if tensor.device != device:
            raise ValueError(f"{name} is on device {tensor.device}; it must be on {device}")
        if tensor.dim() != 2 or tensor.shape[0] != num_group_tables or tensor.shape[1] < size:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be [{num_group_tables}, {size}]")


def _refuse_device(metadata: AttentionMetadata, device: torch.device) -> None:
    for field in FIELDS:
        value = getattr(metadata, field.name)
        if isinstance(value, torch.Tensor):
            wanted = torch.device("cpu") if field.memory is MemorySpace.HOST else device
            if value.device != wanted:
                raise ValueError(f"{field.name} is on device {value.device}; it must be on {wanted}")
