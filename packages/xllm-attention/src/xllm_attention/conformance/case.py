"""`Case`: one conformance case as a value. Owns its meaning and its checks, no tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch

from ..fp8_cache import FP8, CacheScales
from ..spec import AttentionSpec

EMPTY: Final = -1
"""Stands for a sequence in a decode step: a row of KV length 0, which writes nothing and gets output 0."""

FP8_SCALES: Final = ((0.02, 0.004), (1.0, 1.0), (0.0037, 3.0))
"""(k_scale, v_scale) of the layers of a case with fp8 caches, repeated. At 0.004 some values are clamped."""


class CacheLayout(Enum):
    """Memory layout of the caches. A backend supports the strides or refuses to bind."""

    CONTIGUOUS = "contiguous"
    KV_INTERLEAVED = "kv_interleaved"  # k and v of a page interleaved: [num_pages, 2, page_size, K, D]
    HEADS_FIRST = "heads_first"  # [num_pages, K, page_size, D]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sequences with a cached prefix, and the steps that then extend them.

    Attributes:
        name: unique in the table.
        prefix_lens: tokens of each sequence that are in the cache before the first step.
        steps: for each step the batch in its order, as (sequence, new tokens); no sequence twice in a step. The
            sequence may be `EMPTY` in a decode step.
        windows: sliding window of each layer (0: none); the number of layers is its length.
        soft_cap: logits_soft_cap of every layer.
        sinks: every layer has attention sinks, of its own values.
        v_head_dim: elements of a value head, of every layer; 0 is head_dim.
        latent: a token's value is the first elements of its key, in every layer. The backend gets values that are all
            NaN, which it must not read.
        kv_groups: each window size has a page table of its own. Pages that have left a window are freed: the entry in
            the table is the page that no sequence owns, and their content becomes `poison`.
        fp8: every layer has an fp8 cache, with scales of its own.
        bucket: pad the step's tokens, and in decode its sequences, to this number in persistent buffers; in other
            phases two sequences without tokens are added.
        extra_rows: rows of q, k, v and out beyond the step's tokens.
        graph: plan with graph=True.
        poison: fills every slot of the cache that holds no token.
        bad_tokens: (sequence, position) of new tokens that are not finite. Rows that see such a key are not finite
            either. To all others it is masked, and they are as without it.
        bad_value: of bad tokens, NaN or infinity.
        bad_v_only: only one element of one head of v is bad, instead of all of q, k and v.
    """

    name: str
    prefix_lens: tuple[int, ...]
    steps: tuple[tuple[tuple[int, int], ...], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    windows: tuple[int, ...] = (0,)
    soft_cap: float = 0.0
    sinks: bool = False
    v_head_dim: int = 0
    latent: bool = False
    fp8: bool = False
    dtype: torch.dtype = torch.float32
    page_size: int = 16
    kv_groups: bool = False
    bucket: int | None = None
    extra_rows: int = 0
    graph: bool = False
    layout: CacheLayout = CacheLayout.CONTIGUOUS
    poison: float = math.nan
    bad_tokens: tuple[tuple[int, int], ...] = ()
    bad_value: float = math.nan
    bad_v_only: bool = False

    def __post_init__(self) -> None:
        for number, step in enumerate(self.steps):
            live = [seq for seq, _ in step if seq != EMPTY]
            if len(set(live)) != len(live) or any(not 0 <= seq < len(self.prefix_lens) for seq in live):
                raise ValueError(f"step {number} of case {self.name!r} names a sequence twice or an unknown one")
            if len(live) < len(step) and any(num_tokens != 1 for _, num_tokens in step):
                raise ValueError(f"step {number} of case {self.name!r} has an EMPTY row but is not decode")

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        """One per layer."""
        return tuple(
            AttentionSpec(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                scale=self.head_dim**-0.5,
                sliding_window=window,
                logits_soft_cap=self.soft_cap,
                sinks=self.sinks,
                v_head_dim=self.v_head_dim,
                latent=self.latent,
                cache_dtype=FP8 if self.fp8 else None,
                cache_scales=CacheScales(*FP8_SCALES[layer % len(FP8_SCALES)]) if self.fp8 else None,
            )
            for layer, window in enumerate(self.windows)
        )

    @property
    def value_head_dim(self) -> int:
        """Elements of a value head."""
        return self.v_head_dim or self.head_dim

    @property
    def final_lens(self) -> tuple[int, ...]:
        """KV length of each sequence after the last step."""
        lens = list(self.prefix_lens)
        for step in self.steps:
            for seq, num_tokens in step:
                if seq != EMPTY:
                    lens[seq] += num_tokens
        return tuple(lens)

    @property
    def max_num_seqs(self) -> int:
        """Sequences of the largest step, padding included."""
        return max(1, (self.bucket or 0), *(len(step) + 2 for step in self.steps))

    @property
    def max_num_tokens(self) -> int:
        """Tokens of the largest step, padding included."""
        return max(1, (self.bucket or 0), *(sum(n for _, n in step) for step in self.steps))
