"""`StaticAttentionMetadata`: persistent buffers that hold one step's metadata at fixed addresses.

Owns the buffers, how they are filled and how padding rows look; what is padded with what is read from `FIELDS`. Knows
nothing of graphs: a runner decides when to fill and to which size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch

from .fields import FIELDS
from .layout import Layout, View, shape_of
from .protocol import AttentionMetadata
from .vocabulary import Field, Kind, Padding, When, Where

# Attributes are set from the table, which a type checker cannot follow: a base of any type lets it accept them.
if TYPE_CHECKING:
    from typing import Any as _Members
else:
    _Members = object

_MAX_LAYOUTS = 1024  # kept; a step of another size costs the views again
_LINE = 32  # int32 numbers in a cache line
_SIZED_BY = {  # the field whose length says how many there are in a step
    symbol: next(field.name for field in FIELDS if field.shape == (symbol,) and field.when is When.ALWAYS)
    for symbol in ("T", "B")
}
_DTYPES = {Kind.TENSOR_INT32: torch.int32, Kind.TENSOR_BOOL: torch.bool}


class StaticAttentionMetadata(_Members):  # type: ignore[misc]
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
        known = {field.name for field in FIELDS if field.when is When.OPTIONAL}
        if unknown := sorted(set(optional) - known):
            raise ValueError(f"unknown optional fields {unknown}; known are {sorted(known)}")
        self.device = torch.device(device)
        self._buffers: dict[str, torch.Tensor] = {}
        self._offsets: list[torch.Tensor] = []  # buffers that repeat their last value, one below the other
        self._scalars: list[str] = []
        self._held: list[Field] = []
        for field in FIELDS:
            if not field.kind.is_tensor:
                self._scalars.append(field.name)
                setattr(self, field.name, False if field.kind is Kind.BOOL else 0)
            elif field.when is When.OPTIONAL and field.name not in optional:
                setattr(self, field.name, None)
            else:
                self._held.append(field)
        for place in (Where.DEVICE, Where.HOST):
            self._allocate([field for field in self._held if field.where is place])
        # What tails of constant padding are copied from, so that one launch does them and the live parts.
        rows = max(max_num_tokens, max_num_seqs + 1)
        self._constants = {
            value: torch.full((rows,), value, dtype=torch.int32, device=self.device) for value in (0, -1)
        }
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._shown: object = None  # what the attributes of the tensor fields were last set for

    def buffer(self, name: str) -> torch.Tensor:
        """The whole buffer of a tensor field. Raises `KeyError` for a field that is not held."""
        return self._buffers[name]

    def fill(
        self,
        metadata: AttentionMetadata,
        *,
        num_tokens: int,
        num_seqs: int,
        beside: Iterable[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:
        """Copies a step's metadata into the buffers and pads it to `num_tokens` tokens and `num_seqs` sequences.

        Enqueues copies on the current stream; never waits for the device.

        Args:
            metadata: of the step.
            num_tokens, num_seqs: T and B after padding.
            beside: (target, source) pairs of int32 tensors of equal shape on the device, copied in the same launch.

        Raises:
            ValueError: the padded size is below the live size or above the capacity, or a field that must be present
                is None. Nothing has been changed then.
        """
        layout = self._layout(metadata, num_tokens, num_seqs)
        is_decode = not (metadata.is_prefill or metadata.is_chunked_prefill)
        sources = []
        for view in layout.views:
            source = getattr(metadata, view.name)
            if source is None or source.shape != view.live_shape:
                view.check(source, is_decode)
            sources.append(source)
        self._show(layout, sources)
        copies = _Copies(beside)
        for view, source in zip(layout.views, sources, strict=True):
            if source is None:
                continue
            if view.live is None:
                self._fill_own_size(view, source, copies)
            elif view.batched:
                copies.add(view.live, source)
            else:
                view.live.copy_(source, non_blocking=True)
        for target, constant in layout.batched_tails:
            copies.add(target, constant)
        copies.launch()
        for target, tail in layout.tails:
            target.copy_(tail, non_blocking=True)
        for name in self._scalars:
            setattr(self, name, getattr(metadata, name))

    def _show(self, layout: Layout, sources: list[torch.Tensor | None]) -> None:
        """Lets the fields read as what the step has. Attributes cost as much as copies, so they change with it only."""
        shown = (layout, [source is None for source in sources])
        if shown == self._shown:
            return
        self._shown = shown
        for view, source in zip(layout.views, sources, strict=True):
            value = None if source is None else view.tensor
            setattr(self, view.name, value)
            if view.field.alias is not None:
                setattr(self, view.field.alias, value)

    def _fill_own_size(self, view: View, source: torch.Tensor, copies: _Copies) -> None:
        """A field whose size T and B do not tell."""
        constant = view.field.padding.fill_value
        if constant is not None and source.shape != view.shape:
            view.tensor.fill_(constant)
        target = view.tensor[tuple(slice(0, live) for live in source.shape)]
        if view.batched:
            copies.add(target, source)
        else:
            target.copy_(source, non_blocking=True)

    def _layout(self, metadata: AttentionMetadata, num_tokens: int, num_seqs: int) -> Layout:
        """The views of every held buffer at a live and a padded size; kept while there are few."""
        live = {}
        for symbol, name in _SIZED_BY.items():
            tensor = getattr(metadata, name)
            if tensor is None:
                raise ValueError(f"{name} is None; this step must have it")
            live[symbol] = tensor.shape[0]
        key = (num_tokens, num_seqs, *live.values())
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._new_layout({"T": num_tokens, "B": num_seqs}, live)
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = layout
        return layout

    def _new_layout(self, padded: dict[str, int], live: dict[str, int]) -> Layout:
        views, batched_tails, tails = [], [], []
        for field in self._held:
            known = {symbol.removesuffix("+1") for symbol in field.shape} <= live.keys()
            view = View.of(
                field,
                shape_of(field, self._capacity | padded),
                shape_of(field, live) if known else None,
                self.buffer(field.name),
            )
            views.append(view)
            constant = field.padding.fill_value
            if view.live is None or view.live.shape == view.shape or constant is None:
                continue
            tail = view.tensor[view.live.shape[0] :]
            if view.batched:
                batched_tails.append((tail, self._constants[constant][: tail.shape[0]]))
            else:
                tails.append((tail, torch.full_like(tail, constant)))
        first, last = live["B"], padded["B"]
        if first < last:
            for offsets in self._offsets:
                tails.append((offsets[:, first + 1 : last + 1], offsets[:, first : first + 1].expand(-1, last - first)))
        return Layout(views=tuple(views), batched_tails=tuple(batched_tails), tails=tuple(tails))

    def _allocate(self, fields: list[Field]) -> None:
        """Buffers of fields that lie in the same place. Those that repeat their last value are padded together."""
        if not fields:
            return
        on_host = fields[0].where is Where.HOST
        options: dict[str, Any] = {
            "device": "cpu" if on_host else self.device,
            "pin_memory": on_host and self.device.type == "cuda",
        }
        repeating = [field for field in fields if field.padding is Padding.REPEAT_LAST]
        for field in fields:
            if field not in repeating:
                self._buffers[field.name] = torch.zeros(
                    shape_of(field, self._capacity), dtype=_DTYPES[field.kind], **options
                )
        if repeating:
            size = self._capacity["B"] + 1
            # Rows of whole cache lines, so that each begins as an allocation does.
            offsets = torch.zeros((len(repeating), -(-size // _LINE) * _LINE), dtype=torch.int32, **options)
            self._offsets.append(offsets)
            self._buffers |= {field.name: row[:size] for field, row in zip(repeating, offsets, strict=True)}


class _Copies:
    """Copies of one step between device tensors, launched together: a launch costs more than what it copies."""

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        for target, source in pairs:
            self.add(target, source)

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._targets.append(target)
        self._sources.append(source)

    def launch(self) -> None:
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources, non_blocking=True)
