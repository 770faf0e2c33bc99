"""The files of a quantized checkpoint as one, and the check of a tensor's shape. Owns no format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .state_dict import StateDict, shape_and_dtype, tensor_region

_FP8_DTYPES = ("F8_E4M3", "F8_E5M2", "torch.float8_e4m3fn", "torch.float8_e5m2")


class QuantizedFiles:
    """All state dicts together: a weight and its scale may be in different files."""

    def __init__(self, state_dicts: Sequence[StateDict]) -> None:
        self._where = {name: state_dict for state_dict in state_dicts for name in list(state_dict.keys())}

    def has(self, name: str) -> bool:
        return name in self._where

    def shape(self, name: str) -> tuple[int, ...]:
        return shape_and_dtype(self._where[name], name)[0]

    def is_fp8(self, name: str) -> bool:
        return shape_and_dtype(self._where[name], name)[1] in _FP8_DTYPES

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        return tensor_region(self._where[name], name, region)

    def whole(self, name: str) -> torch.Tensor:
        return self._where[name].get_tensor(name)


def misfits(checkpoint: QuantizedFiles, name: str, expected: Sequence[int]) -> Iterator[str]:
    """A message if the tensor has another shape."""
    if (found := checkpoint.shape(name)) != tuple(expected):
        yield f"{name} (checkpoint {list(found)}, expected {list(expected)})"
