"""The product with a weight, as an op: a device may serve the few rows of a decode step by a kernel of its own."""

from __future__ import annotations

from typing import cast

import torch
from torch.nn import functional

from .library import define_op


def _linear_torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return functional.linear(x, weight, bias)


def _linear_fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_linear = define_op(
    "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", _linear_torch, _linear_fake, triton="linear:linear"
)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias: x [..., K], weight [N, K], bias [N] or None -> [..., N].

    Which kernel runs depends on device, dtype, shapes and strides alone, so that eager and captured steps agree.
    """
    return cast(torch.Tensor, _linear(x, weight, bias))
