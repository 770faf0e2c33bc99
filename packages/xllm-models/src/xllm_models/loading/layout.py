"""Shows tensors that a checkpoint stores in another layout in the layout of the layers, region by region.

Owns the layouts (inputs, outputs) and alternating rows. Tensors of several layers in one are the loader's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from .state_dict import PlainSlice, StateDict, TensorSlice
from .weight_map import WeightMap, matches


def in_layer_layout(state_dicts: Sequence[StateDict], weight_map: WeightMap) -> Sequence[StateDict]:
    """The state dicts with the tensors of `weight_map.transposed` and `weight_map.interleaved` in the layers' layout.

    A state dict without such a tensor is returned as it is.
    """
    patterns = (*weight_map.transposed, *weight_map.interleaved)
    return [
        _InLayerLayout(one, weight_map) if any(matches(name, patterns) for name in list(one.keys())) else one
        for one in state_dicts
    ]


class _InLayerLayout:
    def __init__(self, stored: StateDict, weight_map: WeightMap) -> None:
        self._stored = stored
        self._weight_map = weight_map

    def has(self, name: str) -> bool:
        return self._stored.has(name)

    def keys(self) -> Iterable[str]:
        return self._stored.keys()

    def get_slice(self, name: str) -> TensorSlice:
        found: TensorSlice = PlainSlice(self._stored, name)
        is_bias = name.endswith("bias") or len(found.get_shape()) == 1  # has outputs, and no inputs
        if not is_bias and matches(name, self._weight_map.transposed):
            found = _Transposed(found)
        if not matches(name, self._weight_map.interleaved):
            return found
        return _Deinterleaved(found, dim=len(found.get_shape()) - (1 if is_bias else 2))

    def get_tensor(self, name: str) -> torch.Tensor:
        if not matches(name, (*self._weight_map.transposed, *self._weight_map.interleaved)):
            return self._stored.get_tensor(name)
        found = self.get_slice(name)
        return found[tuple(slice(0, size) for size in found.get_shape())]


@dataclass(frozen=True, slots=True)
class _Transposed:
    """[..., outputs, inputs] of a tensor that is stored as [..., inputs, outputs]."""

    stored: TensorSlice

    def get_shape(self) -> list[int]:
        *entries, inputs, outputs = self.stored.get_shape()
        return [*entries, outputs, inputs]

    def get_dtype(self) -> str:
        return self.stored.get_dtype()

    def __getitem__(self, region: tuple[slice, ...], /) -> torch.Tensor:
        *entries, outputs, inputs = region
        return self.stored[(*entries, inputs, outputs)].mT


@dataclass(frozen=True, slots=True)
class _Deinterleaved:
    """First the even, then the odd rows of a tensor along `dim`, its outputs."""

    stored: TensorSlice
    dim: int

    def get_shape(self) -> list[int]:
        return self.stored.get_shape()

    def get_dtype(self) -> str:
        return self.stored.get_dtype()

    def __getitem__(self, region: tuple[slice, ...], /) -> torch.Tensor:
        dim = self.dim
        half, rows = -(-self.get_shape()[dim] // 2), region[dim]
        parts = []
        for parity, start, stop in ((0, rows.start, min(rows.stop, half)), (1, max(rows.start, half), rows.stop)):
            if start < stop:
                first, last = start - parity * half, stop - parity * half
                pairs = slice(2 * first + parity, 2 * last - 1 + parity)
                read = self.stored[(*region[:dim], pairs, *region[dim + 1 :])]
                parts.append(read[(slice(None),) * dim + (slice(0, None, 2),)])
        return torch.cat(parts, dim=dim)
