"""The `Attention` layer: allocates the output and calls the attention op. Owns neither weights nor cache."""

from __future__ import annotations

import torch
from torch import nn

from .ops import attention
from .spec import AttentionSpec


class Attention(nn.Module):
    """Attention of one layer over the paged KV cache of the current backend.

    T tokens, H heads, K kv heads, D head dim, V value head dim.

    Args:
        spec: shape and formula.
        layer_id: index of the layer in the backend's specs and caches.
    """

    def __init__(self, spec: AttentionSpec, layer_id: int) -> None:
        super().__init__()
        self.spec = spec
        self.layer_id = layer_id

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Appends k, v and attends.

        Args:
            q: [T, H, D] or [T, H * D].
            k: [T, K, D] or [T, K * D]. Views, such as slices of a fused projection, are taken as they are.
            v: [T, K, V] or [T, K * V], as k. None if the spec is latent: the values are then k[..., :V].
            sinks: contiguous [H], q's dtype and device, if the spec has sinks; else None.

        Returns:
            Contiguous [T, H, V], or [T, H * V] for q [T, H * D]. Rows that belong to no token of the step (padding) are
            0.

        Raises:
            ValueError: sinks that do not fit the spec or q, or v missing or given against the spec.
        """
        spec, num_tokens = self.spec, q.shape[0]
        if spec.sinks or sinks is not None:
            self._check_sinks(q, sinks)
        k = k.reshape(num_tokens, spec.num_kv_heads, spec.head_dim)
        if spec.latent:
            if v is not None:
                raise ValueError(f"v of layer {self.layer_id} must be None: its spec is latent, values are part of k")
            v = k[..., : spec.value_head_dim]
        elif v is None:
            raise ValueError(f"v of layer {self.layer_id} is None; only latent layers have values that are part of k")
        out = q.new_empty((num_tokens, spec.num_heads, spec.value_head_dim))
        attention(
            q.reshape(num_tokens, spec.num_heads, spec.head_dim),
            k,
            v.reshape(num_tokens, spec.num_kv_heads, spec.value_head_dim),
            out,
            self.layer_id,
            sinks,
        )
        return out if q.dim() == 3 else out.flatten(1)

    def _check_sinks(self, q: torch.Tensor, sinks: torch.Tensor | None) -> None:
        name = f"sinks of layer {self.layer_id}"
        if sinks is None:
            raise ValueError(f"{name} is None; its spec has sinks, so it must be a tensor [{self.spec.num_heads}]")
        if not self.spec.sinks:
            raise ValueError(f"{name} has shape {list(sinks.shape)}; its spec has no sinks, so it must be None")
        if sinks.shape != (self.spec.num_heads,):
            raise ValueError(f"{name} has shape {list(sinks.shape)}; it must be [{self.spec.num_heads}], one per head")
        if sinks.dtype is not q.dtype or sinks.device != q.device:
            raise ValueError(f"{name} is {sinks.dtype} on {sinks.device}; it must be as q, {q.dtype} on {q.device}")
        if not sinks.is_contiguous():
            raise ValueError(f"{name} has strides {sinks.stride()}; it must be contiguous")

    def extra_repr(self) -> str:
        """What `print(model)` shows of the layer."""
        return f"layer_id={self.layer_id}, {self.spec}"
