"""`StaticAttentionMetadata`: persistent buffers that hold one step's metadata at fixed addresses.

Owns the buffers, how they are filled and how padding rows look; what is padded with what is read from `FIELDS`. Knows
nothing of graphs: a runner decides when to fill and to which size.
"""

from __future__ import annotations

from collections.abc import Collection
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
        for field in FIELDS:
            if not field.kind.is_tensor:
                setattr(self, field.name, False if field.kind is Kind.BOOL else 0)
            elif field.when is When.OPTIONAL and field.name not in optional:
                setattr(self, field.name, None)
            else:
                self._buffers[field.name] = self._allocate(field)

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
        padded = {"T": num_tokens, "B": num_seqs}
        sources = {field.name: self._source(field, metadata, padded) for field in FIELDS}
        for field in FIELDS:
            source = sources[field.name]
            if isinstance(source, torch.Tensor):
                setattr(self, field.name, self._fill_tensor(field, source, padded))
            else:
                setattr(self, field.name, source)
            if field.alias is not None:
                setattr(self, field.alias, getattr(self, field.name))

    def _source(
        self, field: Field, metadata: AttentionMetadata, padded: dict[str, int]
    ) -> torch.Tensor | int | bool | None:
        value = getattr(metadata, field.name)
        if not field.kind.is_tensor:
            return value  # type: ignore[no-any-return]
        if field.name not in self._buffers:
            return None
        if value is None:
            decode = not (metadata.is_prefill or metadata.is_chunked_prefill)
            if field.when is When.UNLESS_DECODE and decode:
                return None
            raise ValueError(f"{field.name} is None; this step must have it")
        shape = self._shape(field, {**self._capacity, **padded})
        for axis, (symbol, live, size) in enumerate(zip(field.shape, value.shape, shape, strict=True)):
            limit = self._buffers[field.name].shape[axis]
            if not live <= size <= limit:
                raise ValueError(f"{field.name}: {symbol} is {live} in the step, {size} after padding, {limit} at most")
        return value  # type: ignore[no-any-return]

    def _fill_tensor(self, field: Field, source: torch.Tensor, padded: dict[str, int]) -> torch.Tensor:
        buffer = self._buffers[field.name]
        shape = self._shape(field, {**self._capacity, **padded})
        view = buffer[tuple(slice(0, size) for size in shape)]
        live = view[tuple(slice(0, size) for size in source.shape)]
        rows = source.shape[0]
        if field.padding.fill_value is not None and live.shape != view.shape:
            if source.dim() == 1:
                view[rows:].fill_(field.padding.fill_value)
            else:
                view.fill_(field.padding.fill_value)
        live.copy_(source, non_blocking=True)
        if field.padding is Padding.REPEAT_LAST and rows < view.shape[0]:
            view[rows:].copy_(source[-1:].expand(view.shape[0] - rows), non_blocking=True)
        return view

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
