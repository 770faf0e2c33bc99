"""Caches, page tables and tokens of one conformance case, as a serving framework would own them.

Everything random is derived from the case's name, so a failure repeats.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, replace

import torch

from xllm_metadata import (
    AttentionMetadata,
    BuiltAttentionMetadata,
    LayerCache,
    StaticAttentionMetadata,
    build_attention_metadata,
)

from ..kv_groups import GROUP_FIELDS, kv_groups
from .case import EMPTY, FP8_SCALES, CacheLayout, Case


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One step's inputs. R rows of q, k and v: the step's live tokens, its padding, and the case's extra rows."""

    metadata: AttentionMetadata
    rows: tuple[tuple[int, int, int], ...]  # (sequence, first row, number of rows); EMPTY rows are left out
    slots: tuple[torch.Tensor, ...]  # per layer [live tokens] int64, host: the slots to write
    live_rows: torch.Tensor  # [live tokens] int64, host: their rows
    bad_rows: torch.Tensor  # [bad tokens] int64, host: their rows
    qkv: tuple[torch.Tensor, ...]  # per layer [R, H * D + K * D + K * V], NaN in rows that are not live

    def bad_slots(self, layer: int) -> torch.Tensor:
        """[bad tokens] int64, host."""
        return self.slots[layer][torch.isin(self.live_rows, self.bad_rows)]


class BackendHarness:
    """Caches and token history of a case."""

    def __init__(self, case: Case, device: torch.device) -> None:
        seed = zlib.crc32(case.name.encode())
        self.case = case
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)
        self.lens = list(case.prefix_lens)
        self.kv_groups = kv_groups(case.specs) if case.kv_groups else (0,) * len(case.windows)  # of each layer
        rng = random.Random(seed)
        # By KV cache group and sequence; without groups one table serves all layers.
        self.tables, self.num_pages = [], 0
        for _ in range(max(self.kv_groups) + 1):
            tables, self.num_pages = _page_tables(case, rng)
            self.tables.append(tables)
        self.caches = [_make_cache(case, self.num_pages, device) for _ in case.windows]
        # Per layer and sequence: all keys [L, K, D] and values [L, K, V] so far, as the cache holds them, in the case's
        # dtype (fp64 for fp8 caches) on the CPU.
        self.history: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        for layer, (cache, group) in enumerate(zip(self.caches, self.kv_groups, strict=True)):
            self.history.append([])
            for seq, prefix_len in enumerate(case.prefix_lens):
                _, k, v = self.split(self._random(prefix_len, self.width))
                self.history[-1].append(self._cached(layer, k, v))
                slots = torch.tensor([self._slot(group, seq, p) for p in range(prefix_len)], dtype=torch.int64)
                self.write(cache, layer, slots, k, v)
        self.sinks = tuple(self._draw_sinks() for _ in case.windows)
        self._static: StaticAttentionMetadata | None = None

    def next_step(self, step: tuple[tuple[int, int], ...]) -> StepInputs:
        """Draws the step's tokens, extends the history by them, and builds the metadata."""
        self._free_pages()
        slots: list[list[int]] = [[] for _ in self.tables]  # by KV cache group
        live_rows: list[int] = []
        rows: list[tuple[int, int, int]] = []
        bad_rows: list[int] = []
        row = 0
        for seq, num_tokens in step:
            if seq != EMPTY:
                for group, of_group in enumerate(slots):
                    of_group += [self._slot(group, seq, self.lens[seq] + i) for i in range(num_tokens)]
                live_rows += range(row, row + num_tokens)
                rows.append((seq, row, num_tokens))
                start = self.lens[seq]
                bad_rows += [row + i for i in range(num_tokens) if (seq, start + i) in self.case.bad_tokens]
                self.lens[seq] += num_tokens
            row += num_tokens
        metadata = self._metadata(step, slots, live_rows)
        live = torch.tensor(live_rows, dtype=torch.int64)
        num_rows = metadata.slot_mapping.shape[0] + self.case.extra_rows
        bad = torch.tensor(bad_rows, dtype=torch.int64)
        qkv = tuple(self._draw(layer, num_rows, live, bad, rows) for layer in range(len(self.caches)))
        return StepInputs(
            metadata=metadata,
            rows=tuple(rows),
            slots=tuple(torch.tensor(slots[group], dtype=torch.int64) for group in self.kv_groups),
            live_rows=live,
            bad_rows=bad,
            qkv=qkv,
        )

    @property
    def width(self) -> int:
        """Columns of a fused tensor: H * D of q, K * D of k, and K * V of v unless values are part of the keys."""
        case = self.case
        v_width = 0 if case.latent else case.num_kv_heads * case.value_head_dim
        return (case.num_heads + case.num_kv_heads) * case.head_dim + v_width

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views q [R, H, D], k [R, K, D] and v [R, K, V] of a fused tensor; in a latent layer v is a view of k."""
        case = self.case
        k_begin = case.num_heads * case.head_dim
        v_begin = k_begin + case.num_kv_heads * case.head_dim
        num_rows = qkv.shape[0]
        q = qkv[:, :k_begin].view(num_rows, case.num_heads, case.head_dim)
        k = qkv[:, k_begin:v_begin].view(num_rows, case.num_kv_heads, case.head_dim)
        if case.latent:
            return q, k, k[..., : case.value_head_dim]
        return q, k, qkv[:, v_begin:].view(num_rows, case.num_kv_heads, case.value_head_dim)

    def write(self, cache: LayerCache, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes k [n, K, D] and v [n, K, V] at the slots [n] of a cache of the layer; a latent one has no v cache."""
        scales = FP8_SCALES[layer % len(FP8_SCALES)]
        for tensor, values, scale in ((cache.k, k, scales[0]), (cache.v, v, scales[1])):
            if tensor is None:
                continue
            entries = nearest_fp8(values, scale).to(tensor.dtype) if self.case.fp8 else values
            for slot, entry in zip(slots.tolist(), entries.to(tensor.device), strict=True):
                tensor[slot // tensor.shape[1], slot % tensor.shape[1]] = entry

    def _cached(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that a cache of the layer holds after k and v were written to it."""
        if not self.case.fp8:
            return k, v
        scales = torch.tensor(FP8_SCALES[layer % len(FP8_SCALES)], dtype=torch.float32)  # rounded as the kernels' are
        return tuple(
            nearest_fp8(values, scale).double() * scale for values, scale in zip((k, v), scales.tolist(), strict=True)
        )

    def _draw_sinks(self) -> torch.Tensor | None:
        """[H] sinks of one layer: some matter little next to the scores, some outweigh them."""
        if not self.case.sinks:
            return None
        return (3 * self._random(self.case.num_heads)).to(self.device)

    def _draw(
        self,
        layer: int,
        num_rows: int,
        live: torch.Tensor,
        bad: torch.Tensor,
        rows: list[tuple[int, int, int]],
    ) -> torch.Tensor:
        case = self.case
        qkv = torch.full((num_rows, self.width), torch.nan, dtype=case.dtype)
        qkv[live] = self._random(len(live), self.width)
        qkv[live, : case.num_heads * case.head_dim] *= 2  # a softmax with some contrast
        _, k, v = self.split(qkv)
        if case.bad_v_only:
            v[bad, -1, case.value_head_dim // 2] = case.bad_value
        else:
            qkv[bad] = case.bad_value
        for seq, first, num_tokens in rows:
            old_k, old_v = self.history[layer][seq]
            new = slice(first, first + num_tokens)
            new_k, new_v = self._cached(layer, k[new], v[new])
            self.history[layer][seq] = (torch.cat([old_k, new_k]), torch.cat([old_v, new_v]))
        return qkv.to(self.device)

    def _free_pages(self) -> None:
        """Frees the pages that no later query sees: another sequence may have overwritten them."""
        free = self.num_pages - 1  # no sequence owns it
        page_size = self.case.page_size
        for layer, group in enumerate(self.kv_groups):
            window = self.case.windows[layer]
            for seq, length in enumerate(self.lens if group else ()):
                for index in range(max(0, length - window + 1) // page_size):
                    for _, tensor in self.caches[layer].items():
                        tensor[self.tables[group][seq][index]] = self.case.poison
        for layer, group in enumerate(self.kv_groups):
            for seq, length in enumerate(self.lens if group else ()):
                gone = max(0, length - self.case.windows[layer] + 1) // page_size
                self.tables[group][seq][:gone] = [free] * gone

    def _metadata(
        self, step: tuple[tuple[int, int], ...], slots: list[list[int]], live_rows: list[int]
    ) -> AttentionMetadata:
        q_lens = [0 if seq == EMPTY else num_tokens for seq, num_tokens in step]
        kv_lens = [0 if seq == EMPTY else self.lens[seq] for seq, _ in step]
        tables, *groups = [[[] if seq == EMPTY else of_group[seq] for seq, _ in step] for of_group in self.tables]
        metadata = build_attention_metadata(
            q_lens, kv_lens, tables, self.case.page_size, self.device, group_page_tables=groups or None
        )
        if any(seq == EMPTY for seq, _ in step):
            metadata = _to_decode_step(metadata, len(step), slots, live_rows)
        if self.case.bucket is None:
            return metadata
        return self._pad(metadata, self.case.bucket)

    def _pad(self, metadata: AttentionMetadata, bucket: int) -> AttentionMetadata:
        if self._static is None:
            self._static = StaticAttentionMetadata(
                max_num_tokens=bucket,
                max_num_seqs=self.case.max_num_seqs,
                max_num_pages=self.num_pages,
                device=self.device,
                optional=GROUP_FIELDS if len(self.tables) > 1 else (),
                num_group_tables=max(1, len(self.tables) - 1),
            )
            # Page indices after the live ones point to the page without owner: reading them gives poison.
            self._static.buffer("paged_kv_indices").fill_(self.num_pages - 1)
            if len(self.tables) > 1:
                self._static.buffer("group_paged_kv_indices").fill_(self.num_pages - 1)
        decode = metadata.qo_indptr is None
        num_seqs = metadata.kv_cu_seq_lens.shape[0] - 1
        self._static.fill(metadata, num_tokens=bucket, num_seqs=bucket if decode else num_seqs + 2)
        return self._static

    def _slot(self, group: int, seq: int, position: int) -> int:
        page = self.tables[group][seq][position // self.case.page_size]
        return page * self.case.page_size + position % self.case.page_size

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.case.dtype)


def nearest_fp8(values: torch.Tensor, scale: float) -> torch.Tensor:
    """values / scale as the nearest e4m3 number, in fp32; a tie goes to the even one, and what is not finite to NaN.

    Looked up in the table of all numbers, so that it shares no code with the backends.
    """
    table = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # 0 to 448
    scaled = values.cpu().float() / torch.tensor(scale)
    size = scaled.abs().nan_to_num(0.0)
    middles = (table[1:] + table[:-1]) / 2
    below, above = torch.bucketize(size, middles), torch.bucketize(size, middles, right=True)
    code = torch.where(below % 2 == 0, below, above)  # they differ at a tie
    return torch.where(values.cpu().isfinite(), table[code].copysign(scaled), torch.nan)


def _to_decode_step(
    metadata: BuiltAttentionMetadata, num_rows: int, slots: list[list[int]], live_rows: list[int]
) -> BuiltAttentionMetadata:
    """Turns the metadata of rows with one or no token into a decode step in which every row has one."""
    all_slots = metadata.slot_mapping.new_full((len(slots), num_rows), -1)
    all_slots[:, live_rows] = torch.tensor(slots, dtype=torch.int32, device=all_slots.device)
    return replace(
        metadata,
        slot_mapping=all_slots[0],
        group_slot_mapping=all_slots[1:] if len(slots) > 1 else None,
        qo_indptr=None,
        qo_indptr_host=None,
        max_query_len=1,
        is_prefill=False,
        is_chunked_prefill=False,
    )


def _page_tables(case: Case, rng: random.Random) -> tuple[list[list[int]], int]:
    """Scattered pages for every sequence; no sequence owns the last page, and so the last slot."""
    needs = [-(-length // case.page_size) for length in case.final_lens]
    num_pages = sum(needs) + 3
    free = list(range(num_pages - 1))
    rng.shuffle(free)
    return [[free.pop() for _ in range(need)] for need in needs], num_pages


def _make_cache(case: Case, num_pages: int, device: torch.device) -> LayerCache:
    """A layer's cache, poisoned throughout: k [num_pages, page_size, K, D], and v [..., V] unless it is latent."""
    dtype = torch.float8_e4m3fn if case.fp8 else case.dtype
    k, p, d, v = case.num_kv_heads, case.page_size, case.head_dim, case.value_head_dim
    if case.layout is CacheLayout.KV_INTERLEAVED:
        both = torch.full((num_pages, 2, p, k, max(d, v)), case.poison, dtype=dtype, device=device)
        pair = (both[:, 0, ..., :d], both[:, 1, ..., :v])
    elif case.layout is CacheLayout.HEADS_FIRST:
        first, second = (
            torch.full((num_pages, k, p, size), case.poison, dtype=dtype, device=device) for size in (d, v)
        )
        pair = (first.transpose(1, 2), second.transpose(1, 2))
    else:
        first, second = (
            torch.full((num_pages, p, k, size), case.poison, dtype=dtype, device=device) for size in (d, v)
        )
        pair = (first, second)
    return LayerCache(k=pair[0]) if case.latent else LayerCache(k=pair[0], v=pair[1])
