"""`BackendLimits`: device, dtype and the largest step that an attention backend is made for. Owns no tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendLimits:
    """What a backend is made for, apart from the specs of its layers. The executor derives one from its options.

    Attributes:
        device: of the caches, the queries and the metadata's device tensors.
        dtype: of queries, and of caches whose spec has no cache_dtype.
        max_num_seqs: most sequences per step, padding rows of a graph bucket included.
        max_num_tokens: most tokens per step, padding included.
        max_model_len: largest KV length of a sequence.
        kv_groups: whether each KV cache group has a page table of its own, so that the pages of a sliding window may be
            freed; else all layers share one table.

    Raises:
        ValueError: names a limit below 1 and its value.
    """

    device: torch.device
    dtype: torch.dtype
    max_num_seqs: int
    max_num_tokens: int
    max_model_len: int
    kv_groups: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_tokens", "max_model_len"):
            value: int = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")

    def max_num_pages(self, page_size: int) -> int:
        """Most pages per step: max_num_seqs sequences of max_model_len tokens, in pages of `page_size` tokens."""
        return self.max_num_seqs * -(-self.max_model_len // page_size)
