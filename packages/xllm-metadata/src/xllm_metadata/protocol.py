"""`AttentionMetadata`: what a step's metadata looks like to Python code.

Owns only the static type. Its members are the entries of `FIELDS`, which a test holds it to; the C++ bridge's view,
`StaticAttentionMetadata` and the reference builder's result all satisfy it.
"""

from __future__ import annotations

from typing import Protocol

import torch


class AttentionMetadata(Protocol):
    """Metadata of one step, read-only. T tokens, B sequences, P pages, R data-parallel ranks, W pages a row.

    The memory belongs to whoever built it and stays unmodified until the caller's stream has passed the step.
    A view that C++ handed over raises `RuntimeError` when read after its step.
    """

    @property
    def slot_mapping(self) -> torch.Tensor: ...  # [T] int32, device
    @property
    def paged_kv_indptr(self) -> torch.Tensor: ...  # [B + 1] int32, device
    @property
    def paged_kv_indices(self) -> torch.Tensor: ...  # [P] int32, device
    @property
    def paged_kv_last_page_len(self) -> torch.Tensor: ...  # [B] int32, device
    @property
    def kv_cu_seq_lens(self) -> torch.Tensor: ...  # [B + 1] int32, device
    @property
    def qo_indptr(self) -> torch.Tensor | None: ...  # [B + 1] int32, device; None in decode
    @property
    def q_cu_seq_lens(self) -> torch.Tensor | None: ...  # the same tensor as qo_indptr
    @property
    def kv_seq_lens_host(self) -> torch.Tensor: ...  # [B + 1] int32, host, cumulative
    @property
    def paged_kv_indptr_host(self) -> torch.Tensor: ...  # [B + 1] int32, host
    @property
    def paged_kv_last_page_len_host(self) -> torch.Tensor: ...  # [B] int32, host
    @property
    def qo_indptr_host(self) -> torch.Tensor | None: ...  # [B + 1] int32, host; None in decode
    @property
    def max_query_len(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def is_prefill(self) -> bool: ...
    @property
    def is_chunked_prefill(self) -> bool: ...
    @property
    def block_table(self) -> torch.Tensor | None: ...  # [B, W] int32, device
    @property
    def kv_seq_lens(self) -> torch.Tensor | None: ...  # [B] int32, device
    @property
    def q_seq_lens(self) -> torch.Tensor | None: ...  # [B] int32, device
    @property
    def linear_state_indices(self) -> torch.Tensor | None: ...  # [B] int32, device
    @property
    def has_initial_state(self) -> torch.Tensor | None: ...  # [B] bool, device
    @property
    def dp_token_counts(self) -> torch.Tensor | None: ...  # [R] int32, host
    @property
    def dp_is_decode(self) -> torch.Tensor | None: ...  # [R] bool, host
