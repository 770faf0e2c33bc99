"""`BuiltAttentionMetadata`: one step's metadata as a frozen dataclass. `builder` makes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .protocol import AttentionMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltAttentionMetadata(AttentionMetadata):
    """Metadata of one step as plain tensors; `dataclasses.replace` makes variants.

    `AttentionMetadata` documents the fields. They are written out here for editors and type checkers; a test compares
    names, order, types and optionality with the table.
    """

    slot_mapping: torch.Tensor
    paged_kv_indptr: torch.Tensor
    paged_kv_indices: torch.Tensor
    paged_kv_last_page_len: torch.Tensor
    kv_cu_seq_lens: torch.Tensor
    qo_indptr: torch.Tensor | None = None
    kv_seq_lens_host: torch.Tensor
    paged_kv_indptr_host: torch.Tensor
    paged_kv_last_page_len_host: torch.Tensor
    qo_indptr_host: torch.Tensor | None = None
    max_query_len: int
    max_seq_len: int
    is_prefill: bool
    is_chunked_prefill: bool

    block_table: torch.Tensor | None = None
    kv_seq_lens: torch.Tensor | None = None
    q_seq_lens: torch.Tensor | None = None
    linear_state_indices: torch.Tensor | None = None
    linear_state_write_indices: torch.Tensor | None = None
    has_initial_state: torch.Tensor | None = None
    dp_token_counts: torch.Tensor | None = None
    dp_is_decode: torch.Tensor | None = None
    group_slot_mapping: torch.Tensor | None = None
    group_paged_kv_indices: torch.Tensor | None = None

    @property
    def q_cu_seq_lens(self) -> torch.Tensor | None:
        """Alias of `qo_indptr`: the same tensor."""
        return self.qo_indptr
