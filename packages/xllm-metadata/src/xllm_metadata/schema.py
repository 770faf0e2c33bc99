"""The attributes of a contract field: type, shape, memory, presence and padding. The fields are in `protocol`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch


class FieldType(Enum):
    """Type of a field's value."""

    INT32_TENSOR = "int32 tensor"
    BOOL_TENSOR = "bool tensor"
    INT = "int"
    BOOL = "bool"

    @property
    def dtype(self) -> torch.dtype | None:
        """dtype of a tensor; None for a Python scalar."""
        return {FieldType.INT32_TENSOR: torch.int32, FieldType.BOOL_TENSOR: torch.bool}.get(self)

    @property
    def is_tensor(self) -> bool:
        """Whether the value is a tensor, not a Python scalar."""
        return self.dtype is not None


class MemorySpace(Enum):
    """Memory that holds a tensor. Host tensors are pinned when the device is CUDA."""

    DEVICE = "device"
    HOST = "host"
    NONE = "-"  # scalars


class Presence(Enum):
    """Steps in which a field is present."""

    ALWAYS = "always"
    UNLESS_DECODE = "unless decode"
    OPTIONAL = "optional"


class Padding(Enum):
    """Content of the rows (or tokens) that pad a step to a graph's size."""

    REPEAT_LAST = "repeats the last value"
    ZERO = "0"
    MINUS_ONE = "-1"
    UNTOUCHED = "not written"
    NONE = "-"  # scalars

    @property
    def fill_value(self) -> int | None:
        """The constant that pads; None if the padding is not a constant."""
        return {Padding.ZERO: 0, Padding.MINUS_ONE: -1}.get(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of the step contract.

    `shape` is symbolic: T tokens, B sequences, P pages, R data-parallel ranks, W pages of the longest sequence, G
    KV cache groups with page tables of their own.
    `since` is the contract version, (major, minor), that introduced the field.
    """

    name: str = ""  # set when the table is read
    type: FieldType = FieldType.INT32_TENSOR
    shape: tuple[str, ...] = ()
    memory: MemorySpace = MemorySpace.NONE
    presence: Presence = Presence.ALWAYS
    padding: Padding = Padding.NONE
    doc: str = ""
    alias: str | None = None  # a second name of the same tensor
    since: tuple[int, int] = (1, 0)
    used_by: str = "every model"

    @property
    def shape_text(self) -> str:
        """Shape and dtype as text, such as "[B+1] int32"; the type of a scalar."""
        if not self.type.is_tensor:
            return self.type.value
        return f"[{', '.join(self.shape)}] {self.type.value.removesuffix(' tensor')}"


def device_tensor(shape: str, doc: str, padding: Padding, **attributes: Any) -> Field:
    """A device tensor. `shape` is a comma-separated list of symbols; int32 unless `type` is given."""
    return _tensor(MemorySpace.DEVICE, shape, doc, padding, attributes)


def host_tensor(shape: str, doc: str, padding: Padding, **attributes: Any) -> Field:
    """A host tensor; arguments as for `device_tensor`."""
    return _tensor(MemorySpace.HOST, shape, doc, padding, attributes)


def scalar(doc: str) -> Field:
    """A Python int or bool: the member's annotation says which."""
    return Field(type=FieldType.INT, doc=doc)


def _tensor(memory: MemorySpace, shape: str, doc: str, padding: Padding, attributes: dict[str, Any]) -> Field:
    symbols = tuple(symbol.strip() for symbol in shape.split(","))
    return Field(shape=symbols, memory=memory, doc=doc, padding=padding, **attributes)
