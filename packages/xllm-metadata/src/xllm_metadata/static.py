"""`StaticAttentionMetadata`: persistent buffers that hold one step's metadata at fixed addresses.

Owns the buffers, how they are filled and how padding rows look; what is padded with what is read from `FIELDS`. Knows
nothing of graphs: a runner decides when to fill and to which size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .fields import FIELDS
from .protocol import AttentionMetadata
from .vocabulary import Field, Kind, Padding, When, Where

# Attributes are set from the table, which a type checker cannot follow: a base of any type lets it accept them.
if TYPE_CHECKING:
    from typing import Any as _Members
else:
    _Members = object

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
                self._buffers[field.name] = self._allocate(field)
        # What tails of constant padding are copied from, so that one launch does them and the live parts.
        rows = max(max_num_tokens, max_num_seqs + 1)
        self._constants = {
            value: torch.full((rows,), value, dtype=torch.int32, device=self.device) for value in (0, -1)
        }
        self._layouts: dict[tuple[int, int], tuple[_View, ...]] = {}
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
        views = self._layout(num_tokens, num_seqs)
        is_decode = not (metadata.is_prefill or metadata.is_chunked_prefill)
        sources = []
        for view in views:
            source = getattr(metadata, view.name)
            if source is None or source.shape != view.shape:
                view.check(source, is_decode)
            sources.append(source)
        self._show(views, sources)
        copies = _Copies(beside)
        for view, source in zip(views, sources, strict=True):
            if source is None:
                continue
            if source.shape != view.shape:
                self._fill_padded(view, source, copies)
            elif view.batched:
                copies.add(view.tensor, source)
            else:
                view.tensor.copy_(source, non_blocking=True)
        copies.launch()
        for name in self._scalars:
            setattr(self, name, getattr(metadata, name))

    def _show(self, views: tuple[_View, ...], sources: list[torch.Tensor | None]) -> None:
        """Lets the fields read as what the step has. Attributes cost as much as copies, so they change with it only."""
        shown = (views, [source is None for source in sources])
        if shown == self._shown:
            return
        self._shown = shown
        for view, source in zip(views, sources, strict=True):
            value = None if source is None else view.tensor
            setattr(self, view.name, value)
            if view.field.alias is not None:
                setattr(self, view.field.alias, value)

    def _fill_padded(self, view: _View, source: torch.Tensor, copies: _Copies) -> None:
        field, target = view.field, view.tensor
        rows, size = source.shape[0], view.shape[0]
        constant = field.padding.fill_value
        if source.dim() > 1:
            if constant is not None:
                target.fill_(constant)
            target[tuple(slice(0, live) for live in source.shape)].copy_(source, non_blocking=True)
            return
        if view.batched:
            copies.add(target[:rows], source)
        else:
            target[:rows].copy_(source, non_blocking=True)
        if field.padding is Padding.UNTOUCHED:
            return
        tail = target[rows:]
        if constant is None:
            tail.copy_(source[-1:].expand(size - rows), non_blocking=True)
        elif view.batched:
            copies.add(tail, self._constants[constant][: size - rows])
        else:
            tail.fill_(constant)

    def _layout(self, num_tokens: int, num_seqs: int) -> tuple[_View, ...]:
        """The views of every held buffer at a padded size; made once for each size that fits."""
        layout = self._layouts.get((num_tokens, num_seqs))
        if layout is None:
            sizes = {**self._capacity, "T": num_tokens, "B": num_seqs}
            layout = tuple(_View.of(field, self._shape(field, sizes), self.buffer(field.name)) for field in self._held)
            if all(view.shape == view.tensor.shape for view in layout):
                self._layouts[num_tokens, num_seqs] = layout
        return layout

    def _allocate(self, field: Field) -> torch.Tensor:
        on_host = field.where is Where.HOST
        return torch.zeros(
            self._shape(field, self._capacity),
            dtype=_DTYPES[field.kind],
            device="cpu" if on_host else self.device,
            pin_memory=on_host and self.device.type == "cuda",
        )

    @staticmethod
    def _shape(field: Field, sizes: dict[str, int]) -> tuple[int, ...]:
        return tuple(sizes[symbol.removesuffix("+1")] + symbol.endswith("+1") for symbol in field.shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _View:
    """One buffer at one padded size."""

    field: Field
    name: str
    shape: tuple[int, ...]  # wanted
    limits: tuple[int, ...]  # of the buffer
    tensor: torch.Tensor  # as much of the buffer as is wanted, and there
    batched: bool  # copied in one launch with others

    @classmethod
    def of(cls, field: Field, shape: tuple[int, ...], buffer: torch.Tensor) -> _View:
        return cls(
            field=field,
            name=field.name,
            shape=shape,
            limits=tuple(buffer.shape),
            tensor=buffer[tuple(slice(0, n) for n in shape)],
            batched=field.where is Where.DEVICE and field.kind is Kind.TENSOR_INT32 and len(shape) == 1,
        )

    def check(self, value: torch.Tensor | None, is_decode: bool) -> None:
        """Raises `ValueError` when the step lacks what it must have, or has what does not fit."""
        if value is None:
            if self.field.when is When.UNLESS_DECODE and is_decode:
                return
            raise ValueError(f"{self.name} is None; this step must have it")
        for symbol, live, size, limit in zip(self.field.shape, value.shape, self.shape, self.limits, strict=True):
            if not live <= size <= limit:
                raise ValueError(f"{self.name}: {symbol} is {live} in the step, {size} after padding, {limit} at most")


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
