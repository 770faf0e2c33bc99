"""Describes the copies of a fill: which buffer views receive which field or constant, for one shape of step.

Copies nothing and owns no buffer. The shape of a step is its live and padded T and B, and the fields that it has; a
`CopyPlan` serves all steps of that shape. In the code a step's fields are numbered in the order of `Buffers.fields`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .buffers import Buffers, is_variable_length, shape_of
from .fields import FIELDS
from .schema import Field, FieldType, MemorySpace, Padding, Presence

CopyPair = tuple[torch.Tensor, torch.Tensor]
"""(target, source)."""

# A tail of up to this many repeated offsets is copied element by element in the batch: no further launch.
_MAX_ELEMENTWISE = 16
# The field whose length is the step's live T or B.
_SIZE_FIELDS = {
    symbol: next(field.name for field in FIELDS if field.shape == (symbol,) and field.presence is Presence.ALWAYS)
    for symbol in ("T", "B")
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FieldView:
    """The part of one field's buffer that a step of this shape uses."""

    field: Field
    padded_shape: tuple[int, ...]
    live_shape: tuple[int, ...] | None  # None: variable length
    limits: tuple[int, ...]  # the buffer's shape
    padded: torch.Tensor  # view of padded_shape
    live: torch.Tensor | None  # view of live_shape
    batched_in: MemorySpace | None  # the batch that copies the field; None: a copy of its own

    @classmethod
    def of(
        cls, field: Field, padded_shape: tuple[int, ...], live_shape: tuple[int, ...] | None, buffer: torch.Tensor
    ) -> FieldView:
        """Raises `ValueError` for sizes that the buffer cannot hold."""
        padded = buffer[tuple(slice(0, size) for size in padded_shape)]
        # A batched copy needs one dtype, and padding by rows needs one dimension.
        is_batched = field.type is FieldType.INT32_TENSOR and len(padded_shape) == 1
        view = cls(
            field=field,
            padded_shape=padded_shape,
            live_shape=live_shape,
            limits=tuple(buffer.shape),
            padded=padded,
            live=None if live_shape is None else padded[tuple(slice(0, size) for size in live_shape)],
            batched_in=field.memory if is_batched else None,
        )
        if live_shape is not None:
            view.check_sizes(live_shape)
        return view

    def check(self, value: torch.Tensor | None, is_decode: bool) -> None:
        """Raises `ValueError` when the step lacks the field or its shape does not fit."""
        name = self.field.name
        if value is None:
            if self.field.presence is Presence.OPTIONAL or (
                self.field.presence is Presence.UNLESS_DECODE and is_decode
            ):
                return
            raise ValueError(f"{name} is None; this step must have it")
        if self.live_shape is not None and value.shape != self.live_shape:
            raise ValueError(
                f"{name} has shape {list(value.shape)}; a step of this many tokens and sequences has "
                f"{list(self.live_shape)}"
            )
        self.check_sizes(tuple(value.shape))

    def check_sizes(self, live_shape: tuple[int, ...]) -> None:
        """Raises `ValueError` unless live size <= padded size <= capacity in every dimension."""
        for symbol, live, padded, limit in zip(
            self.field.shape, live_shape, self.padded_shape, self.limits, strict=True
        ):
            if not live <= padded <= limit:
                raise ValueError(
                    f"{self.field.name}: {symbol} is {live} in the step, {padded} after padding, {limit} at most"
                )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyBatch:
    """Copies that are issued together: target views, and the numbers of their source fields."""

    fields: tuple[int, ...]
    targets: tuple[torch.Tensor, ...]  # live parts of `fields`, then tails that a constant pads
    constants: tuple[torch.Tensor, ...]  # sources of these tails
    variable_length: tuple[tuple[int, FieldView], ...]  # the source's shape decides how much of the view is the target
    repeat_last: tuple[tuple[int, tuple[torch.Tensor, ...]], ...]  # field, and the elements that get its last value
    # Longer tails of repeated offsets, of all fields at once. Their source is a live part: copied after the batch.
    repeat_last_rows: tuple[CopyPair, ...]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to copy."""
        return not (self.targets or self.variable_length)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyPlan:
    """All that a fill writes for one shape of step."""

    aliased_views: tuple[tuple[str, torch.Tensor | None], ...]  # the value of each tensor attribute, aliases included
    device: CopyBatch  # one launch
    host: CopyBatch  # one call
    unbatched: CopyBatch  # one copy per field
    # (field, target, constant): constant padding of a variable-length field, filled before it is copied.
    tail_fills: tuple[tuple[int, torch.Tensor, int], ...]


def make_copy_plan(
    buffers: Buffers,
    sources: Sequence[torch.Tensor | None],
    *,
    is_decode: bool,
    num_tokens: int,
    num_seqs: int,
) -> CopyPlan:
    """Checks a step and plans its copies.

    Args:
        buffers: the targets.
        sources: the step's fields, in the order of `buffers.fields`.
        is_decode: whether the fields that decode lacks may be None.
        num_tokens, num_seqs: T and B after padding.

    Raises:
        ValueError: a field that must be present is None, or a size exceeds the padded size or the capacity.
    """
    step = {field.name: source for field, source in zip(buffers.fields, sources, strict=True)}
    live_sizes = {"G": buffers.capacity["G"]}
    for symbol, name in _SIZE_FIELDS.items():
        tensor = step[name]
        if tensor is None:
            raise ValueError(f"{name} is None; this step must have it")
        live_sizes[symbol] = tensor.shape[0]
    padded_sizes = buffers.capacity | {"T": num_tokens, "B": num_seqs}
    views: dict[int, FieldView] = {}  # of the fields that the step has
    aliased_views: list[tuple[str, torch.Tensor | None]] = []
    tail_fills = []
    for index, field in enumerate(buffers.fields):
        live_shape = None if is_variable_length(field) else shape_of(field, live_sizes)
        view = FieldView.of(field, shape_of(field, padded_sizes), live_shape, buffers.by_name[field.name])
        view.check(step[field.name], is_decode)
        value = None if step[field.name] is None else view.padded
        aliased_views += [(name, value) for name in (field.name, field.alias) if name is not None]
        if value is None:
            continue
        views[index] = view
        constant = field.padding.fill_value
        if live_shape is None and constant is not None:
            tail_fills.append((index, view.padded, constant))
    return CopyPlan(
        aliased_views=tuple(aliased_views),
        device=_batch(buffers, views, MemorySpace.DEVICE, (live_sizes["B"], num_seqs)),
        host=_batch(buffers, views, MemorySpace.HOST, (live_sizes["B"], num_seqs)),
        unbatched=_batch(buffers, views, None, (live_sizes["B"], num_seqs)),
        tail_fills=tuple(tail_fills),
    )


def _batch(
    buffers: Buffers, views: dict[int, FieldView], memory: MemorySpace | None, num_seqs: tuple[int, int]
) -> CopyBatch:
    """The batch of one memory space, or with None the fields that are not batched. `num_seqs`: live and padded B."""
    fields, live, tails, constants, variable_length, repeat_last = [], [], [], [], [], []
    elementwise = _repeats_elementwise(memory, num_seqs[1] - num_seqs[0])
    for index, view in views.items():
        if view.batched_in is not memory:
            continue
        if view.live is None:
            variable_length.append((index, view))
            continue
        fields.append(index)
        live.append(view.live)
        if view.live_shape == view.padded_shape:
            continue
        tail = _tail(view)
        constant = view.field.padding.fill_value
        if view.field.padding is Padding.REPEAT_LAST and elementwise:
            repeat_last.append((index, tail.unfold(0, 1, 1).unbind()))
        if constant is not None:
            tails.append(tail)
            if memory is None:
                constants.append(torch.full_like(tail, constant))
            else:
                constants.append(buffers.constants[memory, constant][: tail.shape[0]])
    return CopyBatch(
        fields=tuple(fields),
        targets=(*live, *tails),
        constants=tuple(constants),
        variable_length=tuple(variable_length),
        repeat_last=tuple(repeat_last),
        repeat_last_rows=() if memory is None or elementwise else _repeat_last_rows(buffers.offsets[memory], num_seqs),
    )


def _tail(view: FieldView) -> torch.Tensor:
    """The part that padding fills. Only one dimension is padded: T or B."""
    assert view.live_shape is not None  # variable-length fields have no tail
    sizes = enumerate(zip(view.live_shape, view.padded_shape, strict=True))
    axis, live, padded = next((axis, live, padded) for axis, (live, padded) in sizes if live != padded)
    return view.padded.narrow(axis, live, padded - live)


def _repeats_elementwise(memory: MemorySpace | None, num_elements: int) -> bool:
    """Whether the batch repeats last offsets element by element, to save a launch. A copy on the host is no launch."""
    return memory is MemorySpace.DEVICE and num_elements <= _MAX_ELEMENTWISE


def _repeat_last_rows(offsets: torch.Tensor, num_seqs: tuple[int, int]) -> tuple[CopyPair, ...]:
    """One copy that pads all rows of `offsets`; none when there is no padding."""
    live, padded = num_seqs
    if live == padded or offsets.shape[0] == 0:
        return ()
    tail, last = offsets[:, live + 1 : padded + 1], offsets[:, live : live + 1]
    return ((tail, last.expand_as(tail)),)
