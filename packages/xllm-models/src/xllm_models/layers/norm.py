"""Norm layers, with and without a residual sum. Every rank holds the whole weight."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from ..ops import all_reduce_, all_reduce_add_rms_norm_, fused_add_rms_norm, rms_norm
from .parallel import TensorParallel
from .prefetch import PrefetchingModule


class RMSNorm(nn.Module):
    """x [..., size] -> the same shape, contiguous. With `unit_offset` the factor is 1 + weight (Gemma)."""

    def __init__(self, size: int, eps: float, *, unit_offset: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.unit_offset = unit_offset
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, self.unit_offset)


class ResidualRMSNorm(PrefetchingModule):
    """(x, residual) -> (norm of x + residual, x + residual). Without a residual (first layer): (norm of x, x).

    With `tp` an x that comes with a residual is a partial sum (`reduce_results=False` of the layer before). The
    sum over the ranks, the residual sum and the norm are then one op, which overwrites x.
    """

    def __init__(self, size: int, eps: float, *, unit_offset: bool = False, tp: TensorParallel | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.unit_offset = unit_offset
        self.tp = tp
        self.group = tp.group if tp is not None and tp.size > 1 else None
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return rms_norm(x, self.weight, self.eps, self.unit_offset), x
        if self.group is None:
            return fused_add_rms_norm(x, residual, self.weight, self.eps, self.unit_offset, self.next_weight)
        return all_reduce_add_rms_norm_(
            x, residual, self.weight, self.eps, self.unit_offset, self.group, self.next_weight
        )


class ResidualLayerNorm(nn.Module):
    """As `ResidualRMSNorm`, with a layer norm (arXiv:1607.06450), composed of PyTorch ops. It prefetches nothing."""

    def __init__(self, size: int, eps: float, *, bias: bool = False, tp: TensorParallel | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.tp = tp
        self.group = tp.group if tp is not None and tp.size > 1 else None
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is not None:
            x = (x if self.group is None else all_reduce_(x, self.group)) + residual
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps), x
