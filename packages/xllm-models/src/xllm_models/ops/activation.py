"""Gated activations over a merged gate-up projection."""

from __future__ import annotations

from typing import cast

import torch
from torch.nn import functional

from .library import define_op


def _half(x: torch.Tensor) -> int:
    if x.shape[-1] % 2:
        raise ValueError(f"silu_and_mul needs an even last dimension, got {x.shape[-1]}")
    return x.shape[-1] // 2


def _silu_and_mul_torch(x: torch.Tensor) -> torch.Tensor:
    half = _half(x)
    return (functional.silu(x[..., :half]) * x[..., half:]).contiguous()


def _silu_and_mul_fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], _half(x)))


_silu_and_mul = define_op("silu_and_mul(Tensor x) -> Tensor", _silu_and_mul_torch, _silu_and_mul_fake)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for x = [gate, up]: x [..., 2N] -> [..., N], contiguous.

    silu is rounded to x's dtype before the product, as in HF transformers. An odd last dimension is a ValueError.
    """
    return cast(torch.Tensor, _silu_and_mul(x))
