"""`AttentionSpec`: what one layer's attention computes. Owns no tensor and no layer number."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Shape and formula of one layer's attention. Layers with equal specs form one attention group.

    Per query head h with KV head h // group_size: softmax(cap(scale * q.k)) . v over the keys that are visible, where
    cap(s) = logits_soft_cap * tanh(s / logits_soft_cap), or s when logits_soft_cap is 0.

    Attributes:
        num_heads: query heads (of this rank).
        num_kv_heads: key and value heads (of this rank); divides num_heads.
        head_dim: elements a head.
        scale: factor on q.k before the cap.
        sliding_window: number of keys a query sees, its own included (HF transformers' meaning); 0 is no limit.
        logits_soft_cap: bound on the absolute score; 0 is none.
        shared_cache: whether the layer's cache may share memory: its k with its v, and with those of other such layers.

    Raises:
        ValueError: names the attribute, its value and the limit.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int = 0
    logits_soft_cap: float = 0.0
    shared_cache: bool = False

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

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads
