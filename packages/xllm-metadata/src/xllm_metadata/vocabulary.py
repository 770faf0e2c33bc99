"""What can be said of a field of the step contract: kind, shape, place, presence, padding. Lists no field."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class Kind(Enum):
    """What a field holds."""

    TENSOR_INT32 = "int32 tensor"
    TENSOR_BOOL = "bool tensor"
    INT = "int"
    BOOL = "bool"

    @property
    def is_tensor(self) -> bool:
        """Whether the field is a tensor (the others are Python scalars)."""
        return self in (Kind.TENSOR_INT32, Kind.TENSOR_BOOL)


class Where(Enum):
    """Where a tensor's memory lies."""

    DEVICE = "device"
    HOST = "host"
    SCALAR = "-"


class When(Enum):
    """In which steps a field is present."""

    ALWAYS = "always"
    UNLESS_DECODE = "unless decode"
    OPTIONAL = "optional"


class Padding(Enum):
    """What a padded graph row (or token) holds."""

    REPEAT_LAST = "repeats the last value"
    ZERO = "0"
    MINUS_ONE = "-1"
    UNTOUCHED = "untouched beyond the live part"
    NONE = "-"

    @property
    def fill_value(self) -> int | None:
        """The constant that pads, or None where the padding is not a constant."""
        return {Padding.ZERO: 0, Padding.MINUS_ONE: -1}.get(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of the step contract.

    `shape` is symbolic: T tokens, B sequences, P pages, R data-parallel ranks, W the widest page table of the step.
    `since` is the contract version, (major, minor), that brought the field.
    """

    name: str
    kind: Kind
    shape: tuple[str, ...] = ()
    where: Where = Where.SCALAR
    when: When = When.ALWAYS
    padding: Padding = Padding.NONE
    doc: str = ""
    alias: str | None = None
    since: tuple[int, int] = (1, 0)
    owner: str = "every model"

    @property
    def shape_text(self) -> str:
        """The shape and dtype as documentation shows them."""
        if not self.kind.is_tensor:
            return self.kind.value
        return f"[{', '.join(self.shape)}] {self.kind.value.removesuffix(' tensor')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What a member of the Protocol says of itself besides its name and its Python type."""

    field: Field
    alias_of: str | None = None

    def named(self, name: str, kind: Kind, alias: str | None) -> Field:
        """The field, with what is known only once the member is read."""
        return replace(self.field, name=name, kind=kind, alias=alias)


def device(shape: str, doc: str, padding: Padding, **extra: Any) -> Declaration:
    """A device tensor; `shape` is its symbols, joined by commas. `dtype` is int32 unless `kind` says otherwise."""
    return _tensor(Where.DEVICE, shape, doc, padding, extra)


def host(shape: str, doc: str, padding: Padding, **extra: Any) -> Declaration:
    """A host tensor, pinned where the device is CUDA."""
    return _tensor(Where.HOST, shape, doc, padding, extra)


def scalar(doc: str) -> Declaration:
    """A Python int or bool, as the member's type says."""
    return Declaration(field=Field(name="", kind=Kind.INT, doc=doc))


def alias(of: str) -> Declaration:
    """Another name of the member `of`: the same object."""
    return Declaration(field=Field(name="", kind=Kind.TENSOR_INT32), alias_of=of)


def _tensor(where: Where, shape: str, doc: str, padding: Padding, extra: dict[str, Any]) -> Declaration:
    kind = extra.pop("kind", Kind.TENSOR_INT32)
    symbols = tuple(symbol.strip() for symbol in shape.split(","))
    return Declaration(field=Field(name="", kind=kind, shape=symbols, where=where, padding=padding, doc=doc, **extra))
