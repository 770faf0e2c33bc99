"""Requests of equal length for the sweep, and their steps built as a C++ host builds them: few, wide operations.

Owns the page tables and the pinned memory of one step. The reference builder of `xllm_metadata` is made to be read,
not to be fast, and would be most of a decode step's time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from xllm_metadata import AttentionMetadata, BuiltAttentionMetadata

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Arguments of one `ModelExecutor.execute`."""

    tokens: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata
    logits_indices: torch.Tensor


class StepBuilder:
    """Builds one step after another in the same memory; the device must have passed a step before the next is built.

    Args:
        max_num_seqs: requests.
        max_len: tokens of a request.
        max_num_tokens: of a step.
        device: where steps run.
    """

    def __init__(self, *, max_num_seqs: int, max_len: int, max_num_tokens: int, device: torch.device) -> None:
        self._device = device
        pages = -(-max_len // PAGE_SIZE)
        self.num_blocks = max_num_seqs * pages
        # Scattered pages, as they are after a while.
        order = np.random.default_rng(0).permutation(self.num_blocks)
        self._tables = order.astype(np.int32).reshape(max_num_seqs, pages)
        size = 3 * max_num_tokens + 6 * (max_num_seqs + 1) + self.num_blocks
        pinned = device.type == "cuda"
        self._host = torch.empty(size, dtype=torch.int32, pin_memory=pinned)
        self._on_device = torch.empty(size, dtype=torch.int32, device=device)

    def build(self, requests: slice, first: int, tokens: np.ndarray) -> Step:
        """The step in which each of `requests` gets the tokens [B, n] from position `first` on."""
        tables = self._tables[requests]
        num_seqs, count = tokens.shape
        end = first + count
        pages = -(-end // PAGE_SIZE)
        positions = np.arange(first, end, dtype=np.int32)
        slots = tables[:, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        rows = np.arange(num_seqs + 1, dtype=np.int32)
        fields = {
            "tokens": tokens.reshape(-1),
            "positions": np.tile(positions, num_seqs),
            "slot_mapping": slots.reshape(-1),
            "paged_kv_indptr": rows * pages,
            "paged_kv_indices": tables[:, :pages].reshape(-1),
            "paged_kv_last_page_len": np.full(num_seqs, (end - 1) % PAGE_SIZE + 1, dtype=np.int32),
            "kv_cu_seq_lens": rows * end,
            "qo_indptr": rows * count,
            "last_rows": rows[1:] * count - 1,
        }
        host, device = self._place(fields)
        decode = count == 1
        metadata: AttentionMetadata = BuiltAttentionMetadata(
            slot_mapping=device["slot_mapping"],
            paged_kv_indptr=device["paged_kv_indptr"],
            paged_kv_indices=device["paged_kv_indices"],
            paged_kv_last_page_len=device["paged_kv_last_page_len"],
            kv_cu_seq_lens=device["kv_cu_seq_lens"],
            qo_indptr=None if decode else device["qo_indptr"],
            kv_seq_lens_host=host["kv_cu_seq_lens"],
            paged_kv_indptr_host=host["paged_kv_indptr"],
            paged_kv_last_page_len_host=host["paged_kv_last_page_len"],
            qo_indptr_host=None if decode else host["qo_indptr"],
            max_query_len=count,
            max_seq_len=end,
            is_prefill=not decode and first == 0,
            is_chunked_prefill=not decode and first > 0,
        )
        return Step(
            tokens=device["tokens"],
            positions=device["positions"],
            metadata=metadata,
            logits_indices=device["last_rows"],
        )

    def _place(self, fields: dict[str, np.ndarray]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The fields one after another in pinned memory, and on the device by one copy."""
        flat = np.concatenate(list(fields.values()))
        self._host[: flat.shape[0]].copy_(torch.from_numpy(flat))
        self._on_device[: flat.shape[0]].copy_(self._host[: flat.shape[0]], non_blocking=True)
        sizes = [values.shape[0] for values in fields.values()]
        used = sum(sizes)
        return (
            dict(zip(fields, self._host[:used].split(sizes), strict=True)),
            dict(zip(fields, self._on_device[:used].split(sizes), strict=True)),
        )
