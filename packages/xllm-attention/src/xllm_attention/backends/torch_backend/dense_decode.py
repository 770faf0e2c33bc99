"""Decode in shapes that depend on the bucket only, so that it can be captured in a full graph.

Owns the persistent buffers of one group. Every row reads the same number of pages, as many as the longest sequence
(or the window) may need; what is not its own is masked, scores and values both, since 0 * NaN is NaN.
"""

from __future__ import annotations

import torch

from ...backend import Step
from ...fp8_cache import CacheScales
from ...spec import AttentionSpec
from .attend import accumulation_dtype, gather, soft_cap, softmax


class DenseDecode:
    """One group's decode. B sequences, M pages a row, P page size.

    Args:
        spec: of the group.
        page_size: tokens a page.
        max_num_seqs: B at most.
        max_model_len: KV length at most.
        device: of the buffers.
    """

    def __init__(
        self, spec: AttentionSpec, *, page_size: int, max_num_seqs: int, max_model_len: int, device: torch.device
    ) -> None:
        self._spec = spec
        self._page_size = page_size
        num_pages = -(-max_model_len // page_size)
        if spec.sliding_window:
            # A window that begins anywhere in a page reaches into at most so many.
            num_pages = min(num_pages, (spec.sliding_window + 2 * page_size - 2) // page_size)
        self._page_range = torch.arange(num_pages, device=device)  # [M]
        self._token_range = torch.arange(num_pages * page_size, device=device)  # [M * P]
        self._pages = torch.zeros((max_num_seqs, num_pages), dtype=torch.int64, device=device)  # [B, M]
        self._hidden = torch.ones((max_num_seqs, num_pages * page_size), dtype=torch.bool, device=device)  # [B, M * P]
        self._empty = torch.ones(max_num_seqs, dtype=torch.bool, device=device)  # [B]
        self._num_seqs = 0

    def fill(self, step: Step, page_indices: torch.Tensor) -> None:
        """Fills the buffers for a decode step, on the device and without waiting for it. page_indices: [P] int32."""
        metadata, num_seqs = step.metadata, step.num_seqs
        self._num_seqs = num_seqs
        kv_lens = metadata.kv_cu_seq_lens.to(torch.int64).diff()[:, None]  # [B, 1]
        first_keys = torch.zeros_like(kv_lens)
        if self._spec.sliding_window:
            first_keys = (kv_lens - self._spec.sliding_window).clamp_min(0)
        first_pages = first_keys.div(self._page_size, rounding_mode="floor")
        wanted = first_pages + self._page_range  # [B, M], index into the sequence's own page table
        exists = wanted * self._page_size < kv_lens
        pages = torch.zeros_like(wanted)
        if page_indices.shape[0]:
            indices = torch.where(exists, metadata.paged_kv_indptr[:-1, None] + wanted, 0)
            listed = page_indices.index_select(0, indices.flatten()).view_as(indices)
            pages = torch.where(exists, listed.to(torch.int64), 0)
        positions = first_pages * self._page_size + self._token_range  # [B, M * P]
        self._pages[:num_seqs].copy_(pages)
        self._hidden[:num_seqs].copy_((positions < first_keys) | (positions >= kv_lens))
        self._empty[:num_seqs].copy_(kv_lens[:, 0] == 0)

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
        scales: CacheScales | None = None,
    ) -> None:
        """Attends q [T, H, D], row i being sequence i, and writes all of out [T, H, V]; other rows get 0.

        sinks: [H], of a spec with sinks. scales: of fp8 caches.
        """
        spec, num_seqs = self._spec, self._num_seqs
        hidden = self._hidden[:num_seqs]
        high = accumulation_dtype(q.dtype)
        k_scale, v_scale = (None, None) if scales is None else (scales.k, scales.v)
        k = self._gather(k_cache, k_scale, high).to(high)  # [B, M * P, K, D]
        v = k[..., : spec.value_head_dim] if spec.latent else self._gather(v_cache, v_scale, high)  # [B, M * P, K, V]
        v = v.masked_fill(hidden[:, :, None, None], 0).to(high)
        grouped = q[:num_seqs].reshape(num_seqs, spec.num_kv_heads, spec.group_size, spec.head_dim).to(high)
        scores = torch.einsum("bkgd,blkd->bkgl", grouped, k) * spec.scale
        scores = soft_cap(scores, spec.logits_soft_cap).masked_fill(hidden[:, None, None, :], float("-inf"))
        per_row = None if sinks is None else sinks.view(spec.num_kv_heads, spec.group_size, 1)
        result = torch.einsum("bkgl,blkd->bkgd", softmax(scores, per_row), v)
        result = result.reshape(num_seqs, spec.num_heads, spec.value_head_dim)
        # An empty row's softmax has no term and is NaN, unless there are sinks.
        out[:num_seqs] = result.masked_fill(self._empty[:num_seqs, None, None], 0).to(out.dtype)
        out[num_seqs:].zero_()

    def _gather(self, cache: torch.Tensor, scale: float | None, dtype: torch.dtype) -> torch.Tensor:
        pages = self._pages[: self._num_seqs]
        return gather(cache, pages.flatten(), scale, dtype).view(self._num_seqs, -1, *cache.shape[2:])
