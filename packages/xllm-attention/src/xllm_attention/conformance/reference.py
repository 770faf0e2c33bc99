"""The reference: attention of one sequence in float64, written out row by row. Shares no code with any backend."""

from __future__ import annotations

import torch

from ..spec import AttentionSpec


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Attends the last R tokens of a sequence of L tokens. H heads, K kv heads, D head dim, V value head dim.

    Args:
        q: [R, H, D] queries of positions L - R .. L - 1.
        k: [L, K, D] of all positions.
        v: [L, K, V] of all positions. In a latent layer it is not read: the values are the first elements of the keys.
        spec: shape and formula, as `AttentionSpec` states it.
        sinks: [H], of a spec with sinks.

    Returns:
        [R, H, V] float64, on the CPU.
    """
    if spec.latent:
        v = k[:, :, : spec.value_head_dim]
    q, k, v = (tensor.to("cpu", torch.float64) for tensor in (q, k, v))
    sinks = None if sinks is None else sinks.to("cpu", torch.float64)
    prefix_len = k.shape[0] - q.shape[0]
    out = q.new_empty((*q.shape[:2], spec.value_head_dim))
    for row in range(q.shape[0]):
        position = prefix_len + row
        first = 0 if spec.sliding_window == 0 else max(0, position + 1 - spec.sliding_window)
        for head in range(spec.num_heads):
            kv_head = head // (spec.num_heads // spec.num_kv_heads)
            scores = (k[first : position + 1, kv_head] @ q[row, head]) * spec.scale
            if spec.logits_soft_cap > 0:
                scores = spec.logits_soft_cap * torch.tanh(scores / spec.logits_soft_cap)
            largest = scores.max() if sinks is None else torch.maximum(scores.max(), sinks[head])
            weights = torch.exp(scores - largest)
            total = weights.sum() if sinks is None else weights.sum() + torch.exp(sinks[head] - largest)
            out[row, head] = (weights / total) @ v[first : position + 1, kv_head]
    return out
