"""`LayerSpec`, what a layer declares to backend and host, and `AttentionSpec`, that of attention. Owns no tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch

from xllm_metadata import CacheSpec

from .fp8_cache import FP8, CacheScales


class LayerSpec(Protocol):
    """What one layer with a cache declares: `AttentionSpec`, `StateSpec`."""

    def cache_specs(self, dtype: torch.dtype) -> tuple[CacheSpec, ...]:
        """The cache tensors that the layer needs; `dtype` is that of the model."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Shape and formula of one layer's attention. Layers with equal specs form one attention group.

    Per query head h with KV head h // group_size: softmax(cap(scale * q.k)) . v over the keys that are visible, where
    cap(s) = logits_soft_cap * tanh(s / logits_soft_cap), or s when logits_soft_cap is 0. An attention sink is one more
    score of the softmax: it adds exp(sink_h) to the denominator and nothing to the numerator, as in HF
    transformers' gpt-oss.

    Attributes:
        num_heads: query heads (of this rank).
        num_kv_heads: key and value heads (of this rank); divides num_heads.
        head_dim: elements of a query or key head.
        scale: factor on q.k before the cap.
        sliding_window: number of keys a query sees, its own included (HF transformers' meaning); 0 is no limit.
        logits_soft_cap: bound on the absolute score; 0 is none.
        v_head_dim: elements of a value head where it is not head_dim; else 0.
        latent: a token's value is the first v_head_dim elements of its key, which alone is cached (MLA).
        sinks: whether each query head has an attention sink, a learned logit without a value. It is neither scaled nor
            capped. Every query sees it, whatever the window.
        shared_cache: whether the layer's cache may share memory: its k with its v, and with those of other such layers.
        cache_dtype: of the cache, if it is not the model's: float8_e4m3fn; None is the model's.
        cache_scales: of an fp8 cache. Specs that differ in them only are equal, so that their layers form one group.

    Raises:
        ValueError: names the attribute, its value and the limit.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int = 0
    logits_soft_cap: float = 0.0
    v_head_dim: int = 0
    latent: bool = False
    sinks: bool = False
    shared_cache: bool = False
    cache_dtype: torch.dtype | None = None
    cache_scales: CacheScales | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}; it must be a multiple of num_kv_heads, {self.num_kv_heads}"
            )
        if not math.isfinite(self.scale):
            raise ValueError(f"scale is {self.scale}; it must be finite")
        if self.sliding_window < 0:
            raise ValueError(f"sliding_window is {self.sliding_window}; it must be at least 0 (0: no window)")
        if not (math.isfinite(self.logits_soft_cap) and self.logits_soft_cap >= 0):
            raise ValueError(f"logits_soft_cap is {self.logits_soft_cap}; it must be finite and at least 0")
        if self.v_head_dim < 0:
            raise ValueError(f"v_head_dim is {self.v_head_dim}; it must be at least 0 (0: head_dim)")
        if self.latent and self.value_head_dim > self.head_dim:
            raise ValueError(f"v_head_dim is {self.v_head_dim}; a latent layer has values of at most {self.head_dim}")
        if self.cache_dtype not in (None, FP8):
            raise ValueError(f"cache_dtype is {self.cache_dtype}; it must be {FP8}, or None for the model's dtype")
        if self.cache_scales is not None and self.cache_dtype is None:
            raise ValueError(f"cache_scales is {self.cache_scales}; a cache of the model's dtype has none")
        if self.cache_dtype is not None and self.cache_scales is None:
            object.__setattr__(self, "cache_scales", CacheScales())
        if self.v_head_dim == self.head_dim:
            object.__setattr__(self, "v_head_dim", 0)  # frozen; equal layers have equal specs, and so one group

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def value_head_dim(self) -> int:
        """Elements of a value head."""
        return self.v_head_dim or self.head_dim

    def cache_specs(self, dtype: torch.dtype) -> tuple[CacheSpec, ...]:
        """k, and v unless the layer is latent; both paged."""
        dtype = self.cache_dtype or dtype
        k = CacheSpec("k", (self.num_kv_heads, self.head_dim), dtype)
        v = CacheSpec("v", (self.num_kv_heads, self.value_head_dim), dtype)
        return (k,) if self.latent else (k, v)
