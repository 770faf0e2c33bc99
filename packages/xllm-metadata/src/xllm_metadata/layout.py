"""Views of static buffers: what a fill writes for a step of one size. Owns no memory and copies nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .schema import Field, FieldType, MemorySpace, Presence


def shape_of(field: Field, sizes: dict[str, int]) -> tuple[int, ...]:
    """The field's shape for a number behind each symbol."""
    return tuple(sizes[symbol.removesuffix("+1")] + symbol.endswith("+1") for symbol in field.shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class View:
    """One buffer at one live and one padded size."""

    field: Field
    name: str
    shape: tuple[int, ...]  # after padding
    live_shape: tuple[int, ...] | None  # None where T and B do not tell
    limits: tuple[int, ...]  # of the buffer
    tensor: torch.Tensor  # as much of the buffer as is wanted, and there
    live: torch.Tensor | None  # what is not padding of it
    batch: MemorySpace | None  # copied in one launch with the others of this place; None: by itself

    @classmethod
    def of(cls, field: Field, shape: tuple[int, ...], live_shape: tuple[int, ...] | None, buffer: torch.Tensor) -> View:
        """Raises `ValueError` for sizes that the buffer cannot hold."""
        tensor = buffer[tuple(slice(0, n) for n in shape)]
        view = cls(
            field=field,
            name=field.name,
            shape=shape,
            live_shape=live_shape,
            limits=tuple(buffer.shape),
            tensor=tensor,
            live=None if live_shape is None else tensor[tuple(slice(0, n) for n in live_shape)],
            batch=field.memory if field.type is FieldType.INT32_TENSOR and len(shape) == 1 else None,
        )
        if live_shape is not None:
            view.check_sizes(live_shape)
        return view

    def check(self, value: torch.Tensor | None, is_decode: bool) -> None:
        """Raises `ValueError` when the step lacks what it must have, or has what does not fit."""
        if value is None:
            if self.field.presence is Presence.UNLESS_DECODE and is_decode:
                return
            raise ValueError(f"{self.name} is None; this step must have it")
        if self.live_shape is not None and value.shape != self.live_shape:
            raise ValueError(
                f"{self.name} is {list(value.shape)}; a step of this many tokens and sequences has "
                f"{list(self.live_shape)}"
            )
        self.check_sizes(tuple(value.shape))

    def check_sizes(self, live_shape: tuple[int, ...]) -> None:
        """Raises `ValueError` when live, padded and greatest size are not in this order."""
        for symbol, live, size, limit in zip(self.field.shape, live_shape, self.shape, self.limits, strict=True):
            if not live <= size <= limit:
                raise ValueError(f"{self.name}: {symbol} is {live} in the step, {size} after padding, {limit} at most")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Targets of copies, and which of the step's fields, by place in the order of the table, are their sources."""

    fields: tuple[int, ...]
    targets: tuple[torch.Tensor, ...]  # live parts of these fields, then their tails of constants
    constants: tuple[torch.Tensor, ...]  # sources of the tails
    own_sized: tuple[tuple[int, View], ...]  # fields whose target is as long as the step has it
    repeated: tuple[tuple[int, tuple[torch.Tensor, ...]], ...]  # fields, and the elements that get their last value

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to copy."""
        return not (self.targets or self.own_sized)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """What a fill writes, and where, for steps that have the same fields in one live and one padded size."""

    shown: tuple[tuple[str, torch.Tensor | None], ...]  # what every tensor field reads as then, aliases too
    device: Batch  # in one launch
    host: Batch  # in one call
    alone: Batch  # one by one
    cleared: tuple[tuple[int, torch.Tensor, int], ...]  # (field, target, constant), before all else, if it is shorter
    # (target, source), after the batch of the same place: of what it filled.
    device_repeats: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    host_repeats: tuple[tuple[torch.Tensor, torch.Tensor], ...]
