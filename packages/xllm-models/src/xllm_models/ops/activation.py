"""Gated activations over a merged gate-up projection."""

from __future__ import annotations

import torch
from torch.nn import functional

from xllm_attention.op_library import define_op

from .triton_kernels import triton_kernel


def _half(name: str, x: torch.Tensor) -> int:
    if x.shape[-1] % 2:
        raise ValueError(f"{name} needs an even last dimension, got {x.shape[-1]}")
    return x.shape[-1] // 2


def _silu_and_mul_fake(x: torch.Tensor, prefetch: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], _half("silu_and_mul", x)))


@define_op(fake=_silu_and_mul_fake, kernels=triton_kernel("activation", "silu_and_mul"))
def silu_and_mul(x: torch.Tensor, prefetch: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up for x = [gate, up]: x [..., 2N] -> [..., N], contiguous.

    silu is rounded to x's dtype before the product, as in HF transformers. `prefetch` as in `fused_add_rms_norm`. An
    odd last dimension is a ValueError.
    """
    half = _half("silu_and_mul", x)
    return (functional.silu(x[..., :half]) * x[..., half:]).contiguous()


def _gelu_and_mul_fake(x: torch.Tensor, approximate: str, prefetch: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], _half("gelu_and_mul", x)))


@define_op(fake=_gelu_and_mul_fake, kernels=triton_kernel("activation", "gelu_and_mul"))
def gelu_and_mul(x: torch.Tensor, approximate: str, prefetch: torch.Tensor | None = None) -> torch.Tensor:
    """gelu(gate) * up for x = [gate, up]: x [..., 2N] -> [..., N], contiguous.

    approximate: "none" is x * Phi(x) with the error function, "tanh" its usual approximation (arXiv:1606.08415); any
    other is a RuntimeError. gelu is rounded to x's dtype before the product. `prefetch` as in `fused_add_rms_norm`. An
    odd last dimension is a ValueError.
    """
    half = _half("gelu_and_mul", x)
    return (functional.gelu(x[..., :half], approximate=approximate) * x[..., half:]).contiguous()
