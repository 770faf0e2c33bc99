"""Rotary position embedding of queries and keys from a table of cosines and sines.

Owns the rotation. The table (its frequencies and scaling) belongs to `layers.rotary`.
"""

from __future__ import annotations

from typing import cast

import torch

from .library import define_op


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


_rotary = define_op(
    "rotary(Tensor q, Tensor k, Tensor positions, Tensor cos_sin) -> (Tensor, Tensor)", _rotary_torch, _rotary_fake
)


def rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate pairs (i, i + R/2) of the first R features of each head (arXiv:2104.09864, half-split layout).

    q [T, H, D], k [T, K, D], any strides; positions [T] int32 or int64, each below P; cos_sin [P, R] fp32, R/2
    cosines then R/2 sines, R even and at most D. Features beyond R pass through. The results are new and contiguous.
    """
    return cast(tuple[torch.Tensor, torch.Tensor], _rotary(q, k, positions, cos_sin))
