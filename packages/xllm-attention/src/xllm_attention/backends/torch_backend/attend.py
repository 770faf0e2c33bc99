"""Attention of some query rows over some keys, both dense. Owns the formula; knows nothing of pages or batches."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ...fp8_cache import FP8, dequantize
from ...spec import AttentionSpec


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    *,
    mask: torch.Tensor | None,
    causal: bool,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends R query rows over L keys. R rows, L keys, H heads, K kv heads, D head dim, V value head dim.

    Args:
        q: [R, H, D].
        k: [L, K, D].
        v: [L, K, V].
        spec: shape and formula.
        mask: [R, L] added to the scores (0 or -inf); None when every row sees every key, or when `causal` says.
        causal: row i sees keys 0..i; needs R = L, no mask, and a spec that is not `written_out`.
        sinks: [H], of a spec with sinks.

    Returns:
        [R, H, V] in q's dtype.
    """
    if written_out(spec):
        return _attend_written_out(q, k, v, spec, mask, sinks)
    if q.shape[0] == 1:
        # The heads of a group see the same keys, so they may stand as rows: [1, K, G, D] needs no repeated keys.
        grouped = q.reshape(1, spec.num_kv_heads, spec.group_size, spec.head_dim)
        out = F.scaled_dot_product_attention(
            grouped, k.transpose(0, 1)[None], v.transpose(0, 1)[None], scale=spec.scale
        )
        return out.reshape(1, spec.num_heads, spec.head_dim)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=causal,
        scale=spec.scale,
        enable_gqa=spec.group_size > 1,
    )
    return out[0].transpose(0, 1)


def written_out(spec: AttentionSpec) -> bool:
    """Whether PyTorch's fused kernels cannot compute the spec: they know neither soft cap nor sinks.

    On a CPU they need values of the keys' size. For others PyTorch repeats the keys for every head of a group, which
    for latent layers is a copy per head.
    """
    return bool(spec.logits_soft_cap or spec.sinks or spec.v_head_dim or spec.latent)


def soft_cap(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(scores / cap); the scores themselves when cap is 0."""
    return cap * torch.tanh(scores / cap) if cap else scores


def gather(cache: torch.Tensor, pages: torch.Tensor, scale: float | None, dtype: torch.dtype) -> torch.Tensor:
    """Pages [n] int64 of a cache [num_pages, page_size, K, D] -> [n, page_size, K, D].

    scale: of an fp8 cache, whose entries become values of `dtype`; None: the cache has the dtype that it keeps.
    """
    if scale is None:
        return cache.index_select(0, pages)
    # As bytes: PyTorch has few ops for fp8.
    return dequantize(cache.view(torch.uint8).index_select(0, pages).view(FP8), scale, dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What scores and sums are kept in: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over scores [..., L] and, if given, sinks [..., 1]; the weights of the sinks are left out."""
    if sinks is None:
        return scores.softmax(dim=-1)
    sinks = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]


def _attend_written_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`attend` written out, for specs that are `written_out`."""
    high = accumulation_dtype(q.dtype)
    grouped = q.reshape(q.shape[0], spec.num_kv_heads, spec.group_size, spec.head_dim).to(high)
    scores = torch.einsum("rkgd,lkd->kgrl", grouped, k.to(high)) * spec.scale
    scores = soft_cap(scores, spec.logits_soft_cap)
    if mask is not None:
        scores = scores + mask
    per_row = None if sinks is None else sinks.view(spec.num_kv_heads, spec.group_size, 1, 1)
    out = torch.einsum("kgrl,lkd->rkgd", softmax(scores, per_row), v.to(high))
    return out.reshape(q.shape[0], spec.num_heads, spec.value_head_dim).to(q.dtype)
