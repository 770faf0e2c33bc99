"""Finds, for each norm and gated activation, the weight that its kernel prefetches into L2.

That is the weight of the linear layer that runs next, where a linear layer is the next matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..layers import LinearBase, PrefetchingModule

_aten = torch.ops.aten
_PRODUCTS = (
    torch.ops.xllm.linear,
    torch.ops.xllm.fused_experts,
    torch.ops.xllm.attention,
    *(_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.matmul, _aten.linear),
)


class NextWeights:
    """Follows a run on meta tensors; `assign` then sets `next_weight` of every module that can prefetch."""

    def __init__(self) -> None:
        self._waiting: PrefetchingModule | None = None  # the last that can prefetch, until the next product
        self._found: dict[PrefetchingModule, nn.Module | None] = {}

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Nothing to note: ops say when a module prefetches."""

    def leave(self, name: str, module: nn.Module, outputs: Sequence[torch.Tensor]) -> None:
        """Nothing to note."""

    def op(self, name: str, module: nn.Module, op: Any, args: tuple[Any, ...], outputs: Sequence[torch.Tensor]) -> None:
        if isinstance(module, PrefetchingModule) and any(a.name == "prefetch" for a in op._schema.arguments):
            self._waiting = module
        elif op.overloadpacket in _PRODUCTS and self._waiting is not None:
            linear = module if isinstance(module, LinearBase) else None
            # A module that runs twice, before different layers, prefetches nothing.
            self._found[self._waiting] = linear if self._found.get(self._waiting, linear) is linear else None
            self._waiting = None

    def assign(self) -> None:
        """Set the weights, once they are the model's own (and no longer meta tensors)."""
        for module, linear in self._found.items():
            module.set_next_weight(None if linear is None else linear.get_parameter("weight"))
