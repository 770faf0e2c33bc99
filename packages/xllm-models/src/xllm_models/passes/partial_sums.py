"""Checks that each partial sum of a tensor-parallel layer is summed over the ranks exactly once.

A layer with `reduce_results=False` gives each rank its term of a sum; a norm with `tp=...` sums them. On one rank any
pairing gives the right result, so the check runs at every tp size, when the model is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..layers import Experts, ResidualLayerNorm, ResidualRMSNorm, RowParallelLinear

_aten = torch.ops.aten
# The sum over the ranks may come after these. A factor is one operand that is the same on all ranks.
_FACTORS = (_aten.mul, _aten.mul_, _aten.div, _aten.div_)
_SUMS = (_aten.add, _aten.add_, _aten.sub, _aten.sub_, _aten.cat, _aten.stack)  # of partial sums only
_UNARY = (_aten.clone, _aten.neg, _aten._to_copy)
_SHAPE_ONLY = (_aten.new_empty, _aten.new_zeros, _aten.empty_like, _aten.zeros_like, _aten.ones_like)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """Which layer a tensor comes from."""

    name: str
    partial: bool  # this rank's term of a sum
    taken_by: str = ""  # the norm that has summed it; its memory holds nothing afterwards


class PartialSums:
    """Follows partial sums through a run on meta tensors. A fault is a ValueError that names both modules."""

    def __init__(self) -> None:
        self._origins: dict[int, _Origin] = {}  # by storage, which views share
        self._alive: list[torch.Tensor] = []  # so that no storage's address is used again

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(module, (ResidualRMSNorm, ResidualLayerNorm)):
            self._enter_norm(name, module, *args, **kwargs)

    def _enter_norm(
        self, name: str, norm: ResidualRMSNorm | ResidualLayerNorm, x: torch.Tensor, residual: torch.Tensor | None
    ) -> None:
        if residual is not None and (origin := self._origin(residual)) is not None and origin.partial:
            raise _unsummed(origin, f"{name} takes them as its residual")
        origin = self._origin(x)
        partial = origin is not None and origin.partial
        if origin is not None and partial:
            if norm.tp is None:
                raise _unsummed(origin, f"{name}, which uses them, is made without tp")
            if residual is None:
                raise _unsummed(origin, f"{name} gets them without a residual, and does not sum then")
            if origin.taken_by:
                raise _unsummed(origin, f"{name} uses them after {origin.taken_by} has summed them in place")
            self._origins[_storage(x)] = replace(origin, taken_by=name)
        elif norm.tp is not None and residual is not None:
            raise ValueError(
                f"{name} sums its input over the ranks (tp=...), but that is no partial sum: it comes from "
                f"{origin.name if origin else 'no layer'}. Make the norm without tp, "
                "or the layer with reduce_results=False"
            )

    def leave(self, name: str, module: nn.Module, outputs: Sequence[torch.Tensor]) -> None:
        summing = isinstance(module, (RowParallelLinear, Experts))
        for output in outputs:
            if summing:
                self._set(output, _Origin(name=name, partial=not module.reduce_results))
            elif self._origin(output) is None:
                self._set(output, _Origin(name=name, partial=False))

    def op(self, name: str, module: nn.Module, op: Any, args: tuple[Any, ...], outputs: Sequence[torch.Tensor]) -> None:
        if isinstance(module, (ResidualRMSNorm, ResidualLayerNorm)) or op.is_view:
            return
        packet = op.overloadpacket
        operands = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        origins = [origin for operand in operands if (origin := self._origin(operand)) is not None]
        partial = [origin for origin in origins if origin.partial]
        if packet in _SHAPE_ONLY or not origins:
            return
        if not partial:
            if packet in (*_FACTORS, *_UNARY):
                self._set_all(outputs, origins[0])
            return
        used_up = next((origin for origin in partial if origin.taken_by), None)
        if used_up is not None:
            raise _unsummed(used_up, f"{name} uses them in {packet} after {used_up.taken_by} has summed them in place")
        if packet is torch.ops.xllm.all_reduce_:
            self._set_all(operands, replace(partial[0], partial=False))
        elif _keeps_sum(packet, args, operands, num_partial=len(partial)):
            names = " and ".join(dict.fromkeys(origin.name for origin in partial))
            self._set_all(outputs, _Origin(name=names, partial=True))
        else:
            raise _unsummed(partial[0], f"{name} uses them in {packet} before they are summed")

    def _origin(self, tensor: torch.Tensor) -> _Origin | None:
        return self._origins.get(_storage(tensor))

    def _set(self, tensor: torch.Tensor, origin: _Origin) -> None:
        self._origins[_storage(tensor)] = origin
        self._alive.append(tensor)

    def _set_all(self, tensors: Sequence[torch.Tensor], origin: _Origin) -> None:
        for tensor in tensors:
            self._set(tensor, origin)


def _keeps_sum(packet: Any, args: tuple[Any, ...], operands: Sequence[torch.Tensor], *, num_partial: int) -> bool:
    """Whether the op on the ranks' terms gives the terms of the op on the sum."""
    if packet in _UNARY:
        return True
    if packet in _FACTORS:
        divides = packet in (_aten.div, _aten.div_)
        return num_partial == 1 and not (divides and operands[0] is not args[0])
    # Each rank would add a plain number, so the sum would have it tp_size times.
    return packet in _SUMS and num_partial == len(operands) >= 2


def _storage(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _unsummed(origin: _Origin, fault: str) -> ValueError:
    return ValueError(
        f"{origin.name} gives partial sums over the ranks (reduce_results=False), but {fault}. Make the layer with "
        "reduce_results=True, or let a residual norm with tp=... take its output"
    )
