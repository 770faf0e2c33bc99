"""An attention backend of another distribution: the least that passes the conformance suite.

Installed, it is found by its entry point and chosen by name: attention_backend = "example".
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from xllm_attention import AttentionBackend, BackendCapabilities, Step


class ExampleBackend(AttentionBackend):
    """Sequence by sequence, head by head, in plain PyTorch."""

    name = "example"
    capabilities = BackendCapabilities()

    def _bind(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]], page_size: int) -> None:
        self._caches = caches

    def _plan_step(self, step: Step) -> None:
        metadata = step.metadata
        self._slots = metadata.slot_mapping.tolist()
        self._kv_lens = [end - begin for begin, end in pairwise(metadata.kv_seq_lens_host.tolist())]
        pages = metadata.paged_kv_indices.tolist()
        self._tables = [pages[begin:end] for begin, end in pairwise(metadata.paged_kv_indptr_host.tolist())]
        indptr = metadata.qo_indptr_host
        self._rows = list(range(step.num_seqs + 1)) if indptr is None else indptr.tolist()

    def _plan_group(self, step: Step, group: int) -> None:
        pass

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer_id: int) -> None:
        spec = self.specs[layer_id]
        for cache, values in zip(self._caches[layer_id], (k, v), strict=True):
            for row, slot in enumerate(self._slots):
                if slot >= 0:
                    cache[slot // self.page_size, slot % self.page_size] = values[row]
        out.zero_()
        for (first, end), kv_len, table in zip(pairwise(self._rows), self._kv_lens, self._tables, strict=True):
            keys, values = (cache[table].flatten(0, 1).double() for cache in self._caches[layer_id])
            for row in range(first, end):
                position = kv_len - (end - row)
                begin = max(0, position + 1 - spec.sliding_window) if spec.sliding_window else 0
                if position < 0:
                    continue
                for head in range(spec.num_heads):
                    kv_head = head // spec.group_size
                    scores = keys[begin : position + 1, kv_head] @ q[row, head].double() * spec.scale
                    if spec.logits_soft_cap:
                        scores = spec.logits_soft_cap * torch.tanh(scores / spec.logits_soft_cap)
                    out[row, head] = (scores.softmax(0) @ values[begin : position + 1, kv_head]).to(out.dtype)
