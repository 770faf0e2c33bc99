"""Gated activations over a merged gate-up projection."""

from __future__ import annotations

from typing import cast

import torch
from torch.nn import functional

from .library import define_op


def _half(name: str, x: torch.Tensor) -> int:
    if x.shape[-1] % 2:
        raise ValueError(f"{name} needs an even last dimension, got {x.shape[-1]}")
    return x.shape[-1] // 2


def _silu_and_mul_torch(x: torch.Tensor, prefetch: torch.Tensor | None = None) -> torch.Tensor:
    half = _half("silu_and_mul", x)
    return (functional.silu(x[..., :half]) * x[..., half:]).contiguous()


def _silu_and_mul_fake(x: torch.Tensor, prefetch: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], _half("silu_and_mul", x)))


def _gelu_and_mul_torch(x: torch.Tensor, approximate: str, prefetch: torch.Tensor | None = None) -> torch.Tensor:
    half = _half("gelu_and_mul", x)
    return (functional.gelu(x[..., :half], approximate=approximate) * x[..., half:]).contiguous()


def _gelu_and_mul_fake(x: torch.Tensor, approximate: str, prefetch: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], _half("gelu_and_mul", x)))


_silu_and_mul = define_op(
    "silu_and_mul(Tensor x, Tensor? prefetch=None) -> Tensor",
    _silu_and_mul_torch,
    _silu_and_mul_fake,
    triton="activation:silu_and_mul",
)
_gelu_and_mul = define_op(
    "gelu_and_mul(Tensor x, str approximate, Tensor? prefetch=None) -> Tensor",
    _gelu_and_mul_torch,
    _gelu_and_mul_fake,
    triton="activation:gelu_and_mul",
)


def silu_and_mul(x: torch.Tensor, prefetch: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up for x = [gate, up]: x [..., 2N] -> [..., N], contiguous.

    silu is rounded to x's dtype before the product, as in HF transformers. `prefetch` as in `fused_add_rms_norm`. An
    odd last dimension is a ValueError.
    """
    return cast(torch.Tensor, _silu_and_mul(x, prefetch))


def gelu_and_mul(x: torch.Tensor, approximate: str = "none", prefetch: torch.Tensor | None = None) -> torch.Tensor:
    """gelu(gate) * up for x = [gate, up]: x [..., 2N] -> [..., N], contiguous.

    approximate: "none" is x * Phi(x) with the error function, "tanh" its usual approximation (arXiv:1606.08415); any
    other is a RuntimeError. gelu is rounded to x's dtype before the product. `prefetch` as in `fused_add_rms_norm`. An
    odd last dimension is a ValueError.
    """
    return cast(torch.Tensor, _gelu_and_mul(x, approximate, prefetch))
