"""`StaticAttentionMetadata`: persistent buffers that hold one step's metadata at fixed addresses.

Owns the buffers, how they are filled and how padding rows look; what is padded with what is read from `FIELDS`. Knows
nothing of graphs: a runner decides when to fill and to which size.
"""

from __future__ import annotations

from collections.abc import Collection
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

    def buffer(self, name: str) -> torch.Tensor:
        """The whole buffer of a tensor field. Raises `KeyError` for a field that is not held."""
        return self._buffers[name]

    def fill(self, metadata: AttentionMetadata, *, num_tokens: int, num_seqs: int) -> None:
        """Copies a step's metadata into the buffers and pads it to `num_tokens` tokens and `num_seqs` sequences.

        Enqueues copies on the current stream; never waits for the device.

        Raises:
            ValueError: the padded size is below the live size or above the capacity, or a field that must be present
                is None. Nothing has been changed then.
        """
        views = self._layout(num_tokens, num_seqs)
        is_decode = not (metadata.is_prefill or metadata.is_chunked_prefill)
        sources = [view.checked(getattr(metadata, view.field.name), is_decode) for view in views]
        copies = _Copies()
        for view, source in zip(views, sources, strict=True):
            field = view.field
            value = None if source is None else view.tensor
            setattr(self, field.name, value)
            if field.alias is not None:
                setattr(self, field.alias, value)
            if source is not None:
                self._fill(view, source, copies)
        copies.launch()
        for name in self._scalars:
            setattr(self, name, getattr(metadata, name))

    def _fill(self, view: _View, source: torch.Tensor, copies: _Copies) -> None:
        field, target = view.field, view.tensor
        rows, size = source.shape[0], view.sizes[0]
        constant = field.padding.fill_value
        if source.dim() > 1:
            if constant is not None and source.shape != target.shape:
                target.fill_(constant)
            target[tuple(slice(0, live) for live in source.shape)].copy_(source, non_blocking=True)
            return
        batched = field.where is Where.DEVICE and field.kind is Kind.TENSOR_INT32
        live = target if rows == size else target[:rows]
        if batched:
            copies.add(live, source)
        else:
            live.copy_(source, non_blocking=True)
        if rows == size or field.padding is Padding.UNTOUCHED:
            return
        tail = target[rows:]
        if constant is None:
            tail.copy_(source[-1:].expand(size - rows), non_blocking=True)
        elif batched:
            copies.add(tail, self._constants[constant][: size - rows])
        else:
            tail.fill_(constant)

    def _layout(self, num_tokens: int, num_seqs: int) -> tuple[_View, ...]:
        """The views of every held buffer at a padded size; made once for each size that fits."""
        layout = self._layouts.get((num_tokens, num_seqs))
        if layout is None:
            sizes = {**self._capacity, "T": num_tokens, "B": num_seqs}
            layout = tuple(_View.of(field, self._shape(field, sizes), self.buffer(field.name)) for field in self._held)
            if all(size <= limit for view in layout for size, limit in zip(view.sizes, view.limits, strict=True)):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """One buffer at one padded size."""

    field: Field
    sizes: tuple[int, ...]  # wanted
    limits: tuple[int, ...]  # of the buffer
    tensor: torch.Tensor  # as much of the buffer as is wanted, and there

    @classmethod
    def of(cls, field: Field, sizes: tuple[int, ...], buffer: torch.Tensor) -> _View:
        return cls(
            field=field, sizes=sizes, limits=tuple(buffer.shape), tensor=buffer[tuple(slice(0, n) for n in sizes)]
        )

    def checked(self, value: torch.Tensor | None, is_decode: bool) -> torch.Tensor | None:
        """The step's tensor; None where the step may lack it. Raises `ValueError` when it lacks it or does not fit."""
        if value is None:
            if self.field.when is When.UNLESS_DECODE and is_decode:
                return None
            raise ValueError(f"{self.field.name} is None; this step must have it")
        for symbol, live, size, limit in zip(self.field.shape, value.shape, self.sizes, self.limits, strict=True):
            if not live <= size <= limit:
                raise ValueError(
                    f"{self.field.name}: {symbol} is {live} in the step, {size} after padding, {limit} at most"
                )
        return value


class _Copies:
    """Copies of one step between device tensors, launched together: a launch costs more than what it copies."""

    def __init__(self) -> None:
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._targets.append(target)
        self._sources.append(source)

    def launch(self) -> None:
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources, non_blocking=True)
