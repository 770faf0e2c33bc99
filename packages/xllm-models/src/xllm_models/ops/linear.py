"""The product with a weight, as an op, so that a device can run a kernel of its own for a decode step's few rows."""

from __future__ import annotations

import torch
from torch.nn import functional

from xllm_attention.op_library import define_op

from .triton_kernels import triton_kernel


def _linear_fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@define_op(fake=_linear_fake, kernels=triton_kernel("linear", "linear"))
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias: x [..., K], weight [N, K], bias [N] or None -> [..., N].

    Which kernel runs depends on device, dtype, shapes and strides alone, so that eager and captured steps agree.
    """
    return functional.linear(x, weight, bias)
