"""Rotary position embedding of queries and keys from a table of cosines and sines, alone and behind their norms.

Owns the rotation. The table (its frequencies and scaling) belongs to `layers.rotary`.
T tokens, H query heads, K kv heads, D head dim, P positions of the table, R rotary features.
"""

from __future__ import annotations

from typing import cast

import torch

from .library import define_op
from .norm import normalize


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    out = x.new_empty(x.shape)
    torch.sub(first * cos, second * sin, out=out[..., :half])
    torch.add(second * cos, first * sin, out=out[..., half : 2 * half])
    out[..., 2 * half :] = x[..., 2 * half :]
    return out


def _rotary_torch(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # Rounded to the model's dtype before the products, as in HF transformers.
    cos, sin = cos_sin.index_select(0, positions).to(q.dtype).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotary_fake(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _qk_norm_rope_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = normalize(q, q_weight, eps, unit_offset), normalize(k, k_weight, eps, unit_offset)
    return _rotary_torch(q, k, positions, cos_sin)


def _qk_norm_rope_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


_rotary = define_op(
    "rotary(Tensor q, Tensor k, Tensor positions, Tensor cos_sin) -> (Tensor, Tensor)",
    _rotary_torch,
    _rotary_fake,
    triton="rotary:rotary",
)
_qk_norm_rope = define_op(
    "qk_norm_rope(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor positions, Tensor cos_sin, float eps, "
    "bool unit_offset=False) -> (Tensor, Tensor)",
    _qk_norm_rope_torch,
    _qk_norm_rope_fake,
    triton="rotary:qk_norm_rope",
)


def rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate pairs (i, i + R/2) of the first R features of each head (arXiv:2104.09864, half-split layout).

    q [T, H, D], k [T, K, D], any strides; positions [T] int32 or int64, each below P; cos_sin [P, R] fp32, R/2
    cosines then R/2 sines, R even and at most D. Features beyond R pass through. The results are new and contiguous.
    """
    return cast(tuple[torch.Tensor, torch.Tensor], _rotary(q, k, positions, cos_sin))


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of each head with its weight [D], then `rotary`: one pass over views of a fused projection.

    The arguments and results of both; `unit_offset` as in `rms_norm`.
    """
    out = _qk_norm_rope(q, k, q_weight, k_weight, positions, cos_sin, eps, unit_offset)
    return cast(tuple[torch.Tensor, torch.Tensor], out)
