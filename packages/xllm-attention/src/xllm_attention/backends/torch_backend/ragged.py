"""Attention sequence by sequence over its own tokens: prefill, chunks, mixed batches and decode outside of a graph.

Owns the plan of a step made from the host mirrors. Only real tokens are gathered, so unused pages and
slots after a sequence's end never enter the arithmetic. A token that is not finite reaches only the rows that see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from ...backend import Step
from ...fp8_cache import CacheScales
from ...spec import AttentionSpec
from .attend import accumulation_dtype, attend, gather, written_out

# Rows of one block of a masked query. Bounds the mask and the scores; large enough that a block is one big product.
QUERY_BLOCK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some query rows of a sequence, and the gathered keys that they see."""

    rows: slice  # of the step's tokens
    keys: slice  # of the sequence's gathered keys
    mask: torch.Tensor | None  # [rows, keys] in the query's dtype, 0 or -inf
    causal: bool

    @property
    def hides_keys(self) -> bool:
        """Whether some row does not see some key."""
        return self.causal or self.mask is not None

    def sees(self, marked: torch.Tensor) -> torch.Tensor:
        """Which rows see a marked key: marked [keys] bool -> [rows] bool."""
        if self.causal:
            return marked.cumsum(0) > 0
        visible = marked[None, :] if self.mask is None else marked & (self.mask == 0)
        return visible.any(dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One sequence of the step: the pages to gather, the tokens to keep of them, and its blocks."""

    pages: torch.Tensor  # [n] int64, device
    tokens: slice  # of the n * page_size gathered ones
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedPlan:
    """One group's plan of a step."""

    spec: AttentionSpec
    sequences: tuple[Sequence, ...]
    num_rows: int  # query rows that the blocks cover


def plan_ragged(
    step: Step, page_indices: torch.Tensor, spec: AttentionSpec, page_size: int, dtype: torch.dtype
) -> RaggedPlan:
    """Plans one group. Reads host mirrors (host lists, no device) and slices page_indices [P] int32 on the device.

    Raises:
        ValueError: a sequence with more tokens than its KV length, or fewer pages than its KV length needs.
    """
    metadata = step.metadata
    if spec.cache_dtype is not None:
        dtype = accumulation_dtype(dtype)
    kv_lens = [high - low for low, high in pairwise(metadata.kv_seq_lens_host.tolist())]
    indptr = metadata.paged_kv_indptr_host.tolist()
    if metadata.qo_indptr_host is None:
        # A decode row of KV length 0 is padding: it has no query.
        queries = [slice(row, row + (kv_len > 0)) for row, kv_len in enumerate(kv_lens)]
    else:
        queries = [slice(low, high) for low, high in pairwise(metadata.qo_indptr_host.tolist())]
    indices = page_indices[: indptr[-1]].to(torch.int64)
    masks = _Masks(spec.sliding_window, dtype, indices.device)
    sequences = []
    for i, (rows, kv_len) in enumerate(zip(queries, kv_lens, strict=True)):
        q_len = rows.stop - rows.start
        if q_len > kv_len:
            raise ValueError(f"sequence {i} has {q_len} tokens in the step; its KV length is {kv_len}")
        num_pages = -(-kv_len // page_size)
        if indptr[i + 1] - indptr[i] < num_pages:
            raise ValueError(
                f"sequence {i} has {indptr[i + 1] - indptr[i]} pages; its KV length {kv_len} needs {num_pages}"
            )
        if q_len == 0:
            continue
        first_key = _first_visible(kv_len - q_len, spec.sliding_window)
        first_page = first_key // page_size
        base = first_page * page_size
        sequences.append(
            Sequence(
                pages=indices[indptr[i] + first_page : indptr[i] + num_pages],
                tokens=slice(first_key - base, kv_len - base),
                blocks=_plan_blocks(rows, kv_len, first_key, spec, masks),
            )
        )
    num_rows = sum(rows.stop - rows.start for rows in queries)
    return RaggedPlan(spec=spec, sequences=tuple(sequences), num_rows=num_rows)


def run_ragged(
    plan: RaggedPlan,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    scales: CacheScales | None = None,
) -> None:
    """Attends q [T, H, D] over the caches and writes all of out [T, H, V]; rows that no block covers get 0.

    sinks: [H], of a spec with sinks. scales: of fp8 caches, whose entries are multiplied in the accumulation's dtype.
    """
    spec = plan.spec
    k_scale, v_scale = (None, None) if scales is None else (scales.k, scales.v)
    if scales is not None:
        q = q.to(accumulation_dtype(q.dtype))
    if plan.num_rows < out.shape[0]:
        out.zero_()
    for sequence in plan.sequences:
        # Whole pages at a time: far fewer and longer copies than token by token, and any cache strides will do.
        k = gather(k_cache, sequence.pages, k_scale, q.dtype).flatten(0, 1)[sequence.tokens]
        if spec.latent:
            v = k[..., : spec.value_head_dim]
        else:
            v = gather(v_cache, sequence.pages, v_scale, q.dtype).flatten(0, 1)[sequence.tokens]
        if not any(block.hides_keys for block in sequence.blocks):
            (block,) = sequence.blocks
            out[block.rows] = attend(
                q[block.rows], k[block.keys], v[block.keys], spec, mask=None, causal=False, sinks=sinks
            )
            continue
        # A mask does not remove a NaN: 0 * NaN is NaN. So bad keys become 0, and rows that see one become NaN.
        bad = ~k.isfinite().flatten(1).all(dim=1)  # [L]
        if not spec.latent:
            bad |= ~v.isfinite().flatten(1).all(dim=1)
        k, v = (x.masked_fill(bad[:, None, None], 0.0) for x in (k, v))
        for block in sequence.blocks:
            result = attend(
                q[block.rows],
                k[block.keys],
                v[block.keys],
                spec,
                mask=block.mask,
                causal=block.causal,
                sinks=sinks,
            )
            out[block.rows] = result.masked_fill(block.sees(bad[block.keys])[:, None, None], torch.nan)


def _first_visible(position: int, window: int) -> int:
    """First key that the query at `position` sees; with a window it sees that many keys, its own included."""
    return max(0, position - window + 1) if window else 0


def _plan_blocks(rows: slice, kv_len: int, first_key: int, spec: AttentionSpec, masks: _Masks) -> tuple[Block, ...]:
    """Cuts a sequence's query rows into blocks; `first_key` is the position of the first gathered key."""
    q_len = rows.stop - rows.start
    prefix_len = kv_len - q_len
    plain = prefix_len == 0 and not written_out(spec) and not 0 < spec.sliding_window < kv_len
    if plain and q_len > 1:
        return (Block(rows=rows, keys=slice(0, kv_len), mask=None, causal=True),)
    blocks = []
    for start in range(0, q_len, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, q_len)
        lowest = _first_visible(prefix_len + start, spec.sliding_window)
        keys = slice(lowest - first_key, prefix_len + stop - first_key)
        mask = masks.get(stop - start, prefix_len + start - lowest) if stop - start > 1 else None
        blocks.append(Block(rows=slice(rows.start + start, rows.start + stop), keys=keys, mask=mask, causal=False))
    return tuple(blocks)


class _Masks:
    """Masks of one plan, shared by all blocks of the same shape."""

    def __init__(self, window: int, dtype: torch.dtype, device: torch.device) -> None:
        self._window = window
        self._dtype = dtype
        self._device = device
        self._made: dict[tuple[int, int], torch.Tensor] = {}

    def get(self, num_rows: int, num_before: int) -> torch.Tensor:
        """Mask [num_rows, num_before + num_rows] of rows whose first one has `num_before` keys before its own."""
        mask = self._made.get((num_rows, num_before))
        if mask is None:
            own = torch.arange(num_before, num_before + num_rows, device=self._device)[:, None]
            key = torch.arange(num_before + num_rows, device=self._device)[None, :]
            hidden = key > own
            if self._window:
                hidden |= key <= own - self._window
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
            mask.masked_fill_(hidden, float("-inf"))
            self._made[num_rows, num_before] = mask
        return mask
