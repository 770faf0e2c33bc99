"""Builds the steps of the sweep's requests, which all have the same length, with few vectorized operations per step.

Owns the page tables and the pinned memory of the steps. The reference builder of `xllm_metadata` is written for
readability and would take most of a decode step's time. Like a C++ host that keeps its page tables between steps, this
one rewrites and copies only the fields that change: tokens, positions, slots and lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from xllm_metadata import FIELDS, AttentionMetadata

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Arguments of one `ModelExecutor.execute`."""

    tokens: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata
    logits_indices: torch.Tensor


class StepBuilder:
    """Builds steps in a double buffer: a step can be built and submitted while the device runs the previous one.

    The step before that must have completed.

    Args:
        max_num_seqs: number of requests.
        max_len: tokens per request.
        device: where steps run.
    """

    def __init__(self, *, max_num_seqs: int, max_len: int, device: torch.device) -> None:
        self._device = device
        pages = -(-max_len // PAGE_SIZE)
        self.num_pages = max_num_seqs * pages
        # Scattered pages, as in a server that has run for some time.
        order = np.random.default_rng(0).permutation(self.num_pages)
        self._tables = order.astype(np.int32).reshape(max_num_seqs, pages)
        self._shapes: dict[tuple[int, int, int, int, int], _Shape] = {}

    def build(self, requests: slice, first: int, tokens: np.ndarray | torch.Tensor) -> Step:
        """The step in which each of `requests` gets tokens from position `first` on.

        Args:
            requests: range of B requests.
            first: position of each request's first token.
            tokens: [B, n] int32 on the host; or [B] on the device, one per request, read when the device runs the step.
        """
        num_seqs, count = tokens.shape if tokens.ndim == 2 else (len(tokens), 1)
        pages = -(-(first + count) // PAGE_SIZE)
        key = (requests.start, num_seqs, count, pages, first % 2)
        shape = self._shapes.get(key)
        if shape is None:
            shape = _Shape(self._tables[requests, :pages], requests.start, count, self._device)
            self._shapes[key] = shape
        return shape.step(first, tokens)


class _Shape:
    """Buffers of the steps of one shape (requests, tokens, pages). One copy transfers a step to the device."""

    def __init__(self, tables: np.ndarray, first_request: int, count: int, device: torch.device) -> None:
        num_seqs, pages = tables.shape
        self._count = count
        self._rows = np.arange(num_seqs + 1, dtype=np.int32)
        self._page_starts = tables * PAGE_SIZE
        self._last_page_starts = self._page_starts[:, -1:].copy()
        constant = {
            "paged_kv_indptr": self._rows * pages,
            "paged_kv_indices": tables.reshape(-1),
            "qo_indptr": self._rows * count,
            "last_rows": self._rows[1:] * count - 1,
            "linear_state_indices": self._rows[:-1] + first_request,  # a state slot per request
        }
        changing = {
            "tokens": num_seqs * count,
            "positions": num_seqs * count,
            "slot_mapping": num_seqs * count,
            "paged_kv_last_page_len": num_seqs,
            "kv_cu_seq_lens": num_seqs + 1,
        }
        sizes = changing | {name: values.shape[0] for name, values in constant.items()}
        self._host = torch.empty(sum(sizes.values()), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._on_device = torch.empty_like(self._host, device=device)
        self._mirrors = dict(zip(sizes, self._host.split(list(sizes.values())), strict=True))
        self._fields = dict(zip(sizes, self._on_device.split(list(sizes.values())), strict=True))
        numbers = {name: tensor.numpy() for name, tensor in self._mirrors.items()}
        for name, values in constant.items():
            numbers[name][:] = values
        self._on_device.copy_(self._host, non_blocking=True)
        self._has_initial_state = torch.arange(2, device=device).bool()[:, None].expand(2, num_seqs).contiguous()
        sent = sum(changing.values())
        self._source, self._target = self._host[:sent], self._on_device[:sent]
        self._tokens = numbers["tokens"].reshape(num_seqs, count)
        self._positions = numbers["positions"].reshape(num_seqs, count)
        self._slots = numbers["slot_mapping"].reshape(num_seqs, count)
        self._last_page_len = numbers["paged_kv_last_page_len"]
        self._kv_cu_seq_lens = numbers["kv_cu_seq_lens"]
        # Mutable and reused: creating a frozen value takes several microseconds per step.
        self._metadata: Any = self._described()
        self._step = self._of(self._fields["tokens"])

    def _of(self, tokens: torch.Tensor) -> Step:
        return Step(
            tokens=tokens,
            positions=self._fields["positions"],
            metadata=self._metadata,
            logits_indices=self._fields["last_rows"],
        )

    def step(self, first: int, tokens: np.ndarray | torch.Tensor) -> Step:
        """Fills and returns the step that begins at position `first` of every request."""
        end = first + self._count
        if isinstance(tokens, np.ndarray):
            self._tokens[:] = tokens
        if self._count == 1:
            self._positions.fill(first)
            np.add(self._last_page_starts, first % PAGE_SIZE, out=self._slots)
        else:
            positions = np.arange(first, end, dtype=np.int32)
            self._positions[:] = positions
            np.add(self._page_starts[:, positions // PAGE_SIZE], positions % PAGE_SIZE, out=self._slots)
        self._last_page_len.fill((end - 1) % PAGE_SIZE + 1)
        np.multiply(self._rows, end, out=self._kv_cu_seq_lens)
        self._target.copy_(self._source, non_blocking=True)
        self._metadata.max_seq_len = end
        self._metadata.has_initial_state = self._has_initial_state[int(first > 0)]
        if self._count > 1:
            self._metadata.is_prefill = first == 0
            self._metadata.is_chunked_prefill = first > 0
        return self._step if isinstance(tokens, np.ndarray) else self._of(tokens)

    def _described(self) -> SimpleNamespace:
        """The metadata of all steps of this shape, without the fields that `step` sets."""
        device, host, decode = self._fields, self._mirrors, self._count == 1
        members = dict.fromkeys(field.name for field in FIELDS) | {
            "slot_mapping": device["slot_mapping"],
            "paged_kv_indptr": device["paged_kv_indptr"],
            "paged_kv_indices": device["paged_kv_indices"],
            "paged_kv_last_page_len": device["paged_kv_last_page_len"],
            "kv_cu_seq_lens": device["kv_cu_seq_lens"],
            "qo_indptr": None if decode else device["qo_indptr"],
            "kv_seq_lens_host": host["kv_cu_seq_lens"],
            "paged_kv_indptr_host": host["paged_kv_indptr"],
            "paged_kv_last_page_len_host": host["paged_kv_last_page_len"],
            "qo_indptr_host": None if decode else host["qo_indptr"],
            "max_query_len": self._count,
            "linear_state_indices": device["linear_state_indices"],
            "is_prefill": False,
            "is_chunked_prefill": False,
        }
        aliases = {field.alias: members[field.name] for field in FIELDS if field.alias is not None}
        return SimpleNamespace(**members, **aliases)
