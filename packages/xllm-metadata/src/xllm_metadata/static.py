"""`StaticAttentionMetadata`: persistent buffers that hold one step's metadata at fixed addresses.

Owns the buffers, how they are filled and how padding rows look; what is padded with what is read from `FIELDS`. Knows
nothing of graphs: a runner decides when to fill and to which size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch

from .fields import FIELDS
from .layout import Batch, Layout, View, shape_of
from .protocol import AttentionMetadata
from .schema import Field, FieldType, MemorySpace, Padding, Presence

_MAX_LAYOUTS = 1024  # kept; a step of another size costs the views again
_LINE = 32  # int32 numbers in a cache line
_MAX_SINGLE = 16  # elements of a tail that are copied one by one with all else, which saves the host a launch
_Source = torch.Tensor | None
_SIZED_BY = {  # the field whose length says how many there are in a step
    symbol: next(field.name for field in FIELDS if field.shape == (symbol,) and field.presence is Presence.ALWAYS)
    for symbol in ("T", "B")
}


class StaticAttentionMetadata:
    """Metadata of a step in buffers that never move; satisfies `AttentionMetadata` after `fill`.

    Every field of `FIELDS` is an attribute. A tensor field reads as the leading part of its buffer that the last
    `fill` asked for, so that equal sizes always give equal addresses; `paged_kv_indices` reads as the whole buffer.

    Args:
        max_num_tokens: T at most.
        max_num_seqs: B at most.
        max_num_pages: P at most, all sequences together.
        device: of the device fields. Host fields are pinned when this is a CUDA device.
        optional: names of optional fields to hold; those not named stay None.
        max_pages_per_seq: W at most (`block_table`).
        num_dp_ranks: R (`dp_token_counts`, `dp_is_decode`).

    Raises:
        ValueError: a size below 1 or an unknown optional field.
    """

    slot_mapping: torch.Tensor
    paged_kv_indptr: torch.Tensor
    paged_kv_indices: torch.Tensor
    paged_kv_last_page_len: torch.Tensor
    kv_cu_seq_lens: torch.Tensor
    qo_indptr: torch.Tensor | None
    kv_seq_lens_host: torch.Tensor
    paged_kv_indptr_host: torch.Tensor
    paged_kv_last_page_len_host: torch.Tensor
    qo_indptr_host: torch.Tensor | None
    max_query_len: int
    max_seq_len: int
    is_prefill: bool
    is_chunked_prefill: bool

    block_table: torch.Tensor | None
    kv_seq_lens: torch.Tensor | None
    q_seq_lens: torch.Tensor | None
    linear_state_indices: torch.Tensor | None
    has_initial_state: torch.Tensor | None
    dp_token_counts: torch.Tensor | None
    dp_is_decode: torch.Tensor | None

    q_cu_seq_lens: torch.Tensor | None  # alias of qo_indptr

    def __init__(
        self,
        *,
        max_num_tokens: int,
        max_num_seqs: int,
        max_num_pages: int,
        device: torch.device | str,
        optional: Collection[str] = (),
        max_pages_per_seq: int = 1,
        num_dp_ranks: int = 1,
    ) -> None:
        self._capacity = {
            "T": max_num_tokens,
            "B": max_num_seqs,
            "P": max_num_pages,
            "W": max_pages_per_seq,
            "R": num_dp_ranks,
        }
        for symbol, size in self._capacity.items():
            if size < 1:
                raise ValueError(f"capacity of {symbol} is {size}; it must be at least 1")
        known = {field.name for field in FIELDS if field.presence is Presence.OPTIONAL}
        if unknown := sorted(set(optional) - known):
            raise ValueError(f"unknown optional fields {unknown}; known are {sorted(known)}")
        self.device = torch.device(device)
        self._buffers: dict[str, torch.Tensor] = {}
        self._offsets: dict[MemorySpace, torch.Tensor] = {}  # buffers that repeat their last value, one below the other
        self._scalars: list[str] = []
        self._held: list[Field] = []
        for field in FIELDS:
            if not field.type.is_tensor:
                self._scalars.append(field.name)
                setattr(self, field.name, False if field.type is FieldType.BOOL else 0)
            elif field.presence is Presence.OPTIONAL and field.name not in optional:
                setattr(self, field.name, None)
            else:
                self._held.append(field)
        # Those whose size T and B do not tell come last.
        self._held.sort(key=lambda field: not _is_sized(field))
        self._num_sized = sum(map(_is_sized, self._held))
        # One call each reads a step: its fields are read once, whatever they cost.
        self._read = attrgetter(*(field.name for field in self._held))
        self._read_scalars = attrgetter(*self._scalars)
        # Ordinary tensors even when made in inference mode: later fills may not be.
        with torch.inference_mode(False):
            for place in (MemorySpace.DEVICE, MemorySpace.HOST):
                self._allocate([field for field in self._held if field.memory is place])
        # What tails of constant padding are copied from, so that one launch does them and the live parts.
        rows = max(max_num_tokens, max_num_seqs + 1)
        self._constants = {
            (place, value): torch.full((rows,), value, dtype=torch.int32, device=device)
            for place, device in ((MemorySpace.DEVICE, self.device), (MemorySpace.HOST, "cpu"))
            for value in (0, -1)
        }
        self._layouts: dict[tuple[object, ...], Layout] = {}
        self._own_targets: dict[View, tuple[torch.Size, torch.Tensor]] = {}  # the last one of each
        self._shown: Layout | None = None  # what the attributes of the tensor fields were last set for
        self._host_rest: tuple[Layout, tuple[Any, ...], bool] | None = None  # of the last fill, if any was left out

    def buffer(self, name: str) -> torch.Tensor:
        """The whole buffer of a tensor field. Raises `KeyError` for a field that is not held."""
        return self._buffers[name]

    def fill(
        self,
        metadata: AttentionMetadata,
        *,
        num_tokens: int,
        num_seqs: int,
        extra_copies: Iterable[tuple[torch.Tensor, torch.Tensor]] = (),
        host: bool = True,
    ) -> None:
        """Copies a step's metadata into the buffers and pads it to `num_tokens` tokens and `num_seqs` sequences.

        Enqueues copies on the current stream; never waits for the device.

        Args:
            metadata: of the step.
            num_tokens, num_seqs: T and B after padding.
            extra_copies: (target, source) pairs of int32 device tensors of equal shape, copied in the same launch.
            host: whether host fields are filled now; else they keep an earlier step's values, at this step's sizes,
                until `fill_host`, which is for the time while the device is at work already.

        Raises:
            ValueError: the padded size is below the live size or above the capacity, or a field that must be present
                is None. Nothing has been changed then.
        """
        is_decode = not (metadata.is_prefill or metadata.is_chunked_prefill)
        sources = self._read(metadata)
        layout = self._layout(sources, is_decode, num_tokens, num_seqs)
        on_device, alone = self._copies(layout.device, sources, is_decode), None
        if not layout.alone.is_empty:
            alone = self._copies(layout.alone, sources, is_decode)
        if layout.host.own_sized:
            self._copies(layout.host, sources, is_decode)  # what does not fit is refused now
        if layout is not self._shown:  # attributes cost as much as copies
            self._shown = layout
            self.__dict__.update(layout.shown)
        for index, target, constant in layout.cleared:
            if sources[index].shape != target.shape:
                target.fill_(constant)
        for target, source in extra_copies:
            on_device[0].append(target)
            on_device[1].append(source)
        _copy(*on_device, layout.device_repeats)
        if alone is not None:
            for target, source in zip(*alone, strict=True):
                target.copy_(source, non_blocking=True)
        self.__dict__.update(zip(self._scalars, self._read_scalars(metadata), strict=True))
        self._host_rest = layout, sources, is_decode
        if host:
            self.fill_host()

    def fill_host(self) -> None:
        """Fills the host fields that the last `fill` left out, from that step's memory; nothing if it left out none."""
        rest, self._host_rest = self._host_rest, None
        if rest is not None:
            layout, sources, is_decode = rest
            _copy(*self._copies(layout.host, sources, is_decode), layout.host_repeats)

    def _copies(
        self, batch: Batch, sources: Sequence[Any], is_decode: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Targets and sources of a step's copies. Changes nothing, so that errors do not."""
        targets = [*batch.targets]
        copied = [sources[index] for index in batch.fields]
        copied += batch.constants
        for index, view in batch.own_sized:
            targets.append(self._own_target(view, sources[index], is_decode))
            copied.append(sources[index])
        for index, tail in batch.repeated:
            targets += tail
            copied += [sources[index][-1:]] * len(tail)
        return targets, copied

    def _own_target(self, view: View, source: torch.Tensor, is_decode: bool) -> torch.Tensor:
        """As much of the buffer as the step has. Kept as long as the size stays, which it does for many steps."""
        size = source.shape
        known = self._own_targets.get(view)
        if known is not None and known[0] == size:
            return known[1]
        view.check(source, is_decode)
        target = view.tensor[tuple(slice(0, live) for live in size)]
        self._own_targets[view] = size, target
        return target

    def _layout(self, sources: tuple[Any, ...], is_decode: bool, num_tokens: int, num_seqs: int) -> Layout:
        """What a fill writes for a step of this live and padded size; kept while there are few.

        All that is checked of a step is in the key, but for the sizes that T and B do not tell.
        """
        sized, own_sized = sources[: self._num_sized], sources[self._num_sized :]
        shapes = [None if source is None else source.shape for source in sized]
        key = (num_tokens, num_seqs, is_decode, *shapes, *[source is None for source in own_sized])
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._new_layout(sources, is_decode, {"T": num_tokens, "B": num_seqs})
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
                self._own_targets.clear()
            self._layouts[key] = layout
        return layout

    def _new_layout(self, sources: Sequence[_Source], is_decode: bool, padded: dict[str, int]) -> Layout:
        step = {field.name: source for field, source in zip(self._held, sources, strict=True)}
        live = {}
        for symbol, name in _SIZED_BY.items():
            tensor = step[name]
            if tensor is None:
                raise ValueError(f"{name} is None; this step must have it")
            live[symbol] = tensor.shape[0]
        views, shown, cleared = {}, [], []
        for index, field in enumerate(self._held):
            shape = shape_of(field, self._capacity | padded)
            live_shape = shape_of(field, live) if _is_sized(field) else None
            view = View.of(field, shape, live_shape, self.buffer(field.name))
            view.check(step[field.name], is_decode)
            value = None if step[field.name] is None else view.tensor
            shown += [(name, value) for name in (field.name, field.alias) if name is not None]
            if value is None:
                continue
            views[index] = view
            constant = field.padding.fill_value
            if live_shape is None and constant is not None:
                cleared.append((index, view.tensor, constant))
        first, last = live["B"], padded["B"]
        repeats: dict[MemorySpace, list[tuple[torch.Tensor, torch.Tensor]]] = {
            MemorySpace.DEVICE: [],
            MemorySpace.HOST: [],
        }
        for place, offsets in self._offsets.items():
            if first < last and not _is_single(place, last - first):
                tail, last_value = offsets[:, first + 1 : last + 1], offsets[:, first : first + 1]
                repeats[place].append((tail, last_value.expand_as(tail)))
        return Layout(
            shown=tuple(shown),
            device=self._batch(views, MemorySpace.DEVICE),
            host=self._batch(views, MemorySpace.HOST),
            alone=self._batch(views, None),
            cleared=tuple(cleared),
            device_repeats=tuple(repeats[MemorySpace.DEVICE]),
            host_repeats=tuple(repeats[MemorySpace.HOST]),
        )

    def _batch(self, views: dict[int, View], place: MemorySpace | None) -> Batch:
        """Those of the views, by index of their fields, that are copied together."""
        fields, live, tails, constants, own_sized, repeated = [], [], [], [], [], []
        for index, view in views.items():
            if view.batch is not place:
                continue
            if view.live is None:
                own_sized.append((index, view))
                continue
            fields.append(index)
            live.append(view.live)
            constant = view.field.padding.fill_value
            if view.live.shape == view.shape:
                continue
            tail = view.tensor[view.live.shape[0] :]
            if view.field.padding is Padding.REPEAT_LAST and _is_single(place, tail.shape[0]):
                repeated.append((index, tail.unfold(0, 1, 1).unbind()))
            if constant is not None:
                tails.append(tail)
                if place is None:
                    constants.append(torch.full_like(tail, constant))
                else:
                    constants.append(self._constants[place, constant][: tail.shape[0]])
        return Batch(
            fields=tuple(fields),
            targets=(*live, *tails),
            constants=tuple(constants),
            own_sized=tuple(own_sized),
            repeated=tuple(repeated),
        )

    def _allocate(self, fields: list[Field]) -> None:
        """Buffers of fields that lie in the same place. Those that repeat their last value are padded together."""
        if not fields:
            return
        on_host = fields[0].memory is MemorySpace.HOST
        options: dict[str, Any] = {
            "device": "cpu" if on_host else self.device,
            "pin_memory": on_host and self.device.type == "cuda",
        }
        repeating = [field for field in fields if field.padding is Padding.REPEAT_LAST]
        for field in fields:
            if field not in repeating:
                self._buffers[field.name] = torch.zeros(
                    shape_of(field, self._capacity), dtype=field.type.dtype, **options
                )
        if repeating:
            size = self._capacity["B"] + 1
            # Rows of whole cache lines, so that each begins as an allocation does.
            offsets = torch.zeros((len(repeating), -(-size // _LINE) * _LINE), dtype=torch.int32, **options)
            self._offsets[fields[0].memory] = offsets
            self._buffers |= {field.name: row[:size] for field, row in zip(repeating, offsets, strict=True)}


def _copy(
    targets: list[torch.Tensor],
    sources: list[torch.Tensor],
    repeats: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Copies what lies in one place: all at once, then what repeats it."""
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)
    for target, source in repeats:
        target.copy_(source, non_blocking=True)


def _is_single(place: MemorySpace | None, num_elements: int) -> bool:
    """Whether a tail that repeats a last value is copied element by element."""
    return place is MemorySpace.DEVICE and num_elements <= _MAX_SINGLE


def _is_sized(field: Field) -> bool:
    """Whether T and B tell the field's size."""
    return {symbol.removesuffix("+1") for symbol in field.shape} <= _SIZED_BY.keys()
