"""The `Attention` layer: allocates the output and calls the attention op. Owns neither weights nor cache."""

from __future__ import annotations

import torch
from torch import nn

from .ops import attention
from .spec import AttentionSpec


class Attention(nn.Module):
    """Attention of one layer over the paged KV cache of the current backend.

    T tokens, H heads, K kv heads, D head dim.

    Args:
        spec: shape and formula.
        layer_id: index of the layer in the backend's specs and caches.
    """

    def __init__(self, spec: AttentionSpec, layer_id: int) -> None:
        super().__init__()
        self.spec = spec
        self.layer_id = layer_id

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Appends k, v and attends.

        Args:
            q: [T, H, D] or [T, H * D].
            k, v: [T, K, D] or [T, K * D]. Views, such as slices of a fused projection, are taken as they are.

        Returns:
            Contiguous tensor of q's shape. Rows that belong to no token of the step (padding) are 0.
        """
        spec, num_tokens = self.spec, q.shape[0]
        out = q.new_empty(q.shape)
        attention(
            q.reshape(num_tokens, spec.num_heads, spec.head_dim),
            k.reshape(num_tokens, spec.num_kv_heads, spec.head_dim),
            v.reshape(num_tokens, spec.num_kv_heads, spec.head_dim),
            out.view(num_tokens, spec.num_heads, spec.head_dim),
            self.layer_id,
        )
        return out

    def extra_repr(self) -> str:
        """What `print(model)` shows of the layer."""
        return f"layer_id={self.layer_id}, {self.spec}"
