"""Allocates static buffers: one per tensor field, and the constants that pad them. Copies nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from .fields import FIELDS
from .schema import Field, MemorySpace, Padding, Presence

_LINE = 32  # int32 elements in 128 bytes, a cache line


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Static buffers of a set of tensor fields."""

    capacity: dict[str, int]  # largest size of each symbol: T, B, P, W, G
    fields: tuple[Field, ...]  # tensor fields that have a buffer; variable-length ones last
    by_name: dict[str, torch.Tensor]
    # By memory: [n, >= B + 1] int32. Its rows are the n buffers that Padding.REPEAT_LAST pads, so that one copy can pad
    # them all.
    offsets: dict[MemorySpace, torch.Tensor]
    # By memory and value: [max(T, B + 1)] int32, full of 0 or -1. Constant padding is copied from here.
    constants: dict[tuple[MemorySpace, int], torch.Tensor]

    @classmethod
    def allocate(cls, capacity: dict[str, int], optional: Collection[str], device: torch.device) -> Buffers:
        """Allocates zeroed buffers for the fields that every step has and for the named optional ones.

        Raises:
            ValueError: a size below 1, or an optional field that is unknown or whose size is not in `capacity`.
        """
        for symbol, size in capacity.items():
            if size < 1:
                raise ValueError(f"capacity of {symbol} is {size}; it must be at least 1")
        known = [f.name for f in FIELDS if f.presence is Presence.OPTIONAL and set(f.shape) <= capacity.keys()]
        if unknown := sorted(set(optional) - set(known)):
            raise ValueError(f"no static buffers for optional fields {unknown}; known are {sorted(known)}")
        fields = [f for f in FIELDS if f.type.is_tensor and (f.presence is not Presence.OPTIONAL or f.name in optional)]
        fields.sort(key=is_variable_length)
        by_name: dict[str, torch.Tensor] = {}
        offsets: dict[MemorySpace, torch.Tensor] = {}
        constants: dict[tuple[MemorySpace, int], torch.Tensor] = {}
        # Ordinary tensors even in inference mode: a fill outside of inference mode could not write inference tensors.
        with torch.inference_mode(False):
            for memory in (MemorySpace.DEVICE, MemorySpace.HOST):
                on_host = memory is MemorySpace.HOST
                where: dict[str, Any] = {
                    "device": torch.device("cpu") if on_host else device,
                    "pin_memory": on_host and device.type == "cuda",
                }
                in_memory = [field for field in fields if field.memory is memory]
                repeated = [field.name for field in in_memory if field.padding is Padding.REPEAT_LAST]
                offsets[memory] = _offset_rows(len(repeated), capacity["B"] + 1, where)
                by_name |= zip(repeated, offsets[memory][:, : capacity["B"] + 1], strict=True)
                for field in in_memory:
                    if field.name not in by_name:
                        shape = shape_of(field, capacity)
                        by_name[field.name] = torch.zeros(shape, dtype=field.type.dtype, **where)
                length = max(capacity["T"], capacity["B"] + 1)
                for value in (0, -1):
                    constants[memory, value] = torch.full((length,), value, dtype=torch.int32, device=where["device"])
        return cls(capacity=capacity, fields=tuple(fields), by_name=by_name, offsets=offsets, constants=constants)


def shape_of(field: Field, sizes: dict[str, int]) -> tuple[int, ...]:
    """The field's shape with a size for each symbol."""
    return tuple(sizes[symbol.removesuffix("+1")] + symbol.endswith("+1") for symbol in field.shape)


def is_variable_length(field: Field) -> bool:
    """Whether T, B and the constant G do not determine the field's shape, as with P and W."""
    return not {symbol.removesuffix("+1") for symbol in field.shape} <= {"T", "B", "G"}


def _offset_rows(num_rows: int, size: int, where: dict[str, Any]) -> torch.Tensor:
    """Zeros [num_rows, >= size] int32. Each row starts on a cache line, aligned as a buffer of its own would be."""
    return torch.zeros((num_rows, -(-size // _LINE) * _LINE), dtype=torch.int32, **where)
