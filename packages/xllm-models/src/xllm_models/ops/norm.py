"""RMSNorm ops, alone and fused with the residual add.

T rows, N features. Both ops are functional, unlike vLLM's. An in-place form moves the same bytes and saves
only an allocation, which is free in a captured graph. New outputs never alias an input that a hook, a recorded graph or
torch.compile still reads.
"""

from __future__ import annotations

import torch

from xllm_attention.op_library import define_op

from .triton_kernels import triton_kernel


def normalize(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool) -> torch.Tensor:
    """The formula of `rms_norm` in plain torch, for any strides."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)


@define_op(kernels=triton_kernel("norm", "rms_norm"))
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467).

    x [..., N], any strides; weight [N] in x's dtype; the result is contiguous. The norm is taken in fp32, rounded
    to x's dtype, then multiplied by the weight in that dtype: the same order as HF transformers has for
    Llama. With `unit_offset` the factor is 1 + weight and the result is rounded once at the end, as HF does for Gemma.
    """
    return normalize(x, weight, eps, unit_offset).contiguous()


@define_op(kernels=triton_kernel("norm", "fused_add_rms_norm"))
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
    prefetch: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and the sum itself (rounded to x's dtype) as the next residual.

    x, residual [..., N]; weight [N]; both results are new and contiguous. `unit_offset` as in `rms_norm`. `prefetch` is
    the weight of the next matrix product, which the kernel prefetches into L2; no result depends on it.
    """
    total = (x + residual).contiguous()
    return normalize(total, weight, eps, unit_offset).contiguous(), total
