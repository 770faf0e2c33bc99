"""Checks one step's metadata against the contract.

`validate` checks everything and reads device tensors back to the host. It is for tests and for debugging a host, not
for production. `check_present` reads no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from .fields import FIELDS
from .protocol import AttentionMetadata
from .schema import Field, FieldType, MemorySpace, Presence
from .slot_validation import check_groups, check_slots

_MIRRORS = {
    "kv_seq_lens_host": "kv_cu_seq_lens",
    "paged_kv_indptr_host": "paged_kv_indptr",
    "paged_kv_last_page_len_host": "paged_kv_last_page_len",
    "qo_indptr_host": "qo_indptr",
}
_INDPTRS = ("paged_kv_indptr", "kv_cu_seq_lens", "qo_indptr")
_ALWAYS = tuple(field.name for field in FIELDS if field.presence is Presence.ALWAYS)
_UNLESS_DECODE = tuple(field.name for field in FIELDS if field.presence is Presence.UNLESS_DECODE)


def check_present(metadata: AttentionMetadata) -> None:
    """Checks that no field that the step must have is None. Reads no tensor.

    Raises:
        ValueError: names the first field that is None.
    """
    decode = not (metadata.is_prefill or metadata.is_chunked_prefill)
    for name in _ALWAYS if decode else _ALWAYS + _UNLESS_DECODE:
        if getattr(metadata, name) is None:
            raise ValueError(f"{name} is None; it must be a tensor in this step")


def validate(
    metadata: AttentionMetadata,
    *,
    num_tokens: int,
    num_seqs: int,
    num_pages: int,
    page_size: int,
    num_slots: int | None = None,
    group_num_pages: Sequence[int] | None = None,
    positions: torch.Tensor | None = None,
    logits_indices: torch.Tensor | None = None,
) -> None:
    """Checks a step's metadata, and its positions and logits indices if given.

    Args:
        metadata: the step's metadata.
        num_tokens: T, the number of token ids. Tokens after the last sequence's must have slot -1.
        num_seqs: B.
        num_pages: pages in the KV cache, of KV cache group 0 if there are several.
        page_size: tokens per page.
        num_slots: state slots, if they are known.
        group_num_pages: pages of KV cache groups 1 to G, if the step must have tables for them.
        positions: [T], position of each token.
        logits_indices: [n], rows whose logits are wanted.

    Raises:
        ValueError: names the field, its value and the limit.
    """
    decode = _check_flags(metadata)
    check_present(metadata)
    for field in FIELDS:
        _check_field(field, metadata, {"T": num_tokens, "B": num_seqs}, decode)
    values = {
        field.name: getattr(metadata, field.name).tolist()
        for field in FIELDS
        if field.type.is_tensor and len(field.shape) == 1 and getattr(metadata, field.name) is not None
    }
    for host, device in _MIRRORS.items():
        if host in values and values[host] != values[device]:
            i, ours, theirs = next(
                (i, a, b) for i, (a, b) in enumerate(zip(values[host], values[device], strict=True)) if a != b
            )
            raise ValueError(f"{host}[{i}] is {ours}; {device} on the device has {theirs}")
    for name in _INDPTRS:
        if name in values:
            _check_indptr(name, values[name])
    q_lens = _query_lens(values, num_tokens, num_seqs)
    _check_pages(values, num_pages, page_size)
    _check_lengths(metadata, values, q_lens, decode)
    check_slots(values, q_lens, page_size, num_pages)
    _check_optional(metadata, values, q_lens)
    _check_states(values, q_lens, num_slots)
    check_groups(metadata, values, q_lens, page_size, group_num_pages)
    if positions is not None:
        _check_positions(positions.tolist(), values, q_lens, num_tokens)
    for i, row in enumerate([] if logits_indices is None else logits_indices.tolist()):
        if not 0 <= row < num_tokens:
            raise ValueError(f"logits_indices[{i}] is {row}; the step has rows 0 to {num_tokens - 1}")


def _check_flags(metadata: AttentionMetadata) -> bool:
    for name in ("is_prefill", "is_chunked_prefill"):
        if not isinstance(getattr(metadata, name), bool):
            raise ValueError(f"{name} is {getattr(metadata, name)!r}; it must be a bool")
    if metadata.is_prefill and metadata.is_chunked_prefill:
        raise ValueError("is_prefill and is_chunked_prefill are both True; at most one may be")
    return not (metadata.is_prefill or metadata.is_chunked_prefill)


def _check_field(field: Field, metadata: AttentionMetadata, sizes: dict[str, int], decode: bool) -> None:
    value = getattr(metadata, field.name)
    if not field.type.is_tensor:
        if field.type is FieldType.INT and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ValueError(f"{field.name} is {value!r}; it must be an int of at least 0")
        return
    if value is None:
        return
    if decode and field.presence is Presence.UNLESS_DECODE:
        raise ValueError(f"{field.name} is present with shape {list(value.shape)}; in a decode step it must be None")
    if value.dtype is not field.type.dtype:
        raise ValueError(f"{field.name} has dtype {value.dtype}; it must be {field.type.dtype}")
    expected = torch.device("cpu") if field.memory is MemorySpace.HOST else metadata.slot_mapping.device
    if value.device.type == "meta":
        raise ValueError(f"{field.name} is on device meta; it must hold values")
    if value.device != expected:
        raise ValueError(f"{field.name} is on device {value.device}; it must be on {expected}")
    if value.dim() != len(field.shape):
        raise ValueError(f"{field.name} has {value.dim()} dimensions; it must have {len(field.shape)}")
    if not value.is_contiguous():
        raise ValueError(f"{field.name} has strides {value.stride()}; it must be contiguous")
    for axis, symbol in enumerate(field.shape):
        base = symbol.removesuffix("+1")
        size = sizes[base] + symbol.endswith("+1") if base in sizes else None
        if size is not None and value.shape[axis] != size:
            raise ValueError(f"{field.name} has {value.shape[axis]} entries; {symbol} is {size}")


def _check_indptr(name: str, values: list[int]) -> None:
    if values[0] != 0:
        raise ValueError(f"{name}[0] is {values[0]}; it must be 0")
    for i, (low, high) in enumerate(pairwise(values)):
        if high < low:
            raise ValueError(f"{name}[{i + 1}] is {high}, below {name}[{i}], which is {low}")


def _query_lens(values: dict[str, list[int]], num_tokens: int, num_seqs: int) -> list[int]:
    if "qo_indptr" not in values:
        if num_tokens != num_seqs:
            raise ValueError(f"a decode step has one token per sequence: {num_tokens} tokens, {num_seqs} sequences")
        return [1] * num_seqs
    if values["qo_indptr"][-1] > num_tokens:
        raise ValueError(f"qo_indptr ends at {values['qo_indptr'][-1]}; the step has {num_tokens} tokens")
    return [high - low for low, high in pairwise(values["qo_indptr"])]


def _check_lengths(metadata: AttentionMetadata, values: dict[str, list[int]], q_lens: list[int], decode: bool) -> None:
    kv_lens = [high - low for low, high in pairwise(values["kv_cu_seq_lens"])]
    for i, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        empty_row = decode and kv_len == 0
        if q_len > kv_len and not empty_row:
            raise ValueError(
                f"qo_indptr gives sequence {i} {q_len} tokens; its KV length in kv_cu_seq_lens is {kv_len}"
            )
        if metadata.is_prefill and q_len != kv_len:
            raise ValueError(
                f"is_prefill: sequence {i} has {q_len} tokens in qo_indptr and KV length {kv_len} in kv_cu_seq_lens; "
                "they must be equal"
            )
    for name, source, lens in (("max_query_len", "qo_indptr", q_lens), ("max_seq_len", "kv_cu_seq_lens", kv_lens)):
        if getattr(metadata, name) != max(lens, default=0):
            of = f" in {source}" if source in values else ""
            raise ValueError(f"{name} is {getattr(metadata, name)}; the longest{of} is {max(lens, default=0)}")


def _check_pages(values: dict[str, list[int]], num_pages: int, page_size: int) -> None:
    indptr, indices = values["paged_kv_indptr"], values["paged_kv_indices"]
    if indptr[-1] != len(indices):
        raise ValueError(f"paged_kv_indptr ends at {indptr[-1]}; paged_kv_indices has {len(indices)} entries")
    for i, page in enumerate(indices):
        if not 0 <= page < num_pages:
            raise ValueError(f"paged_kv_indices[{i}] is {page}; the cache has pages 0 to {num_pages - 1}")
    kv_lens = [high - low for low, high in pairwise(values["kv_cu_seq_lens"])]
    for i, (kv_len, (low, high)) in enumerate(zip(kv_lens, pairwise(indptr), strict=True)):
        last, seq_pages = values["paged_kv_last_page_len"][i], high - low
        smallest, largest = (1, page_size) if kv_len else (0, 0)
        if not smallest <= last <= largest:
            raise ValueError(
                f"paged_kv_last_page_len[{i}] is {last}; with KV length {kv_len} in kv_cu_seq_lens it must be "
                f"{smallest} to {largest}"
            )
        if seq_pages != -(-kv_len // page_size):
            raise ValueError(
                f"paged_kv_indptr gives sequence {i} {seq_pages} pages of {page_size}; "
                f"its KV length {kv_len} in kv_cu_seq_lens needs {-(-kv_len // page_size)}"
            )
        if kv_len and (seq_pages - 1) * page_size + last != kv_len:
            raise ValueError(
                f"paged_kv_last_page_len[{i}] is {last}; with {seq_pages} pages of {page_size} that is KV length "
                f"{(seq_pages - 1) * page_size + last}, kv_cu_seq_lens has {kv_len}"
            )


def _check_optional(metadata: AttentionMetadata, values: dict[str, list[int]], q_lens: list[int]) -> None:
    kv_lens = [high - low for low, high in pairwise(values["kv_cu_seq_lens"])]
    for name, lens in (("kv_seq_lens", kv_lens), ("q_seq_lens", q_lens)):
        if name in values and values[name] != lens:
            raise ValueError(f"{name} is {values[name]}; the offsets give {lens}")
    if metadata.block_table is not None:
        indptr, indices = values["paged_kv_indptr"], values["paged_kv_indices"]
        for i, row in enumerate(metadata.block_table.tolist()):
            pages = indices[indptr[i] : indptr[i + 1]]
            if row[: len(pages)] != pages:
                raise ValueError(f"block_table[{i}] is {row}; paged_kv_indices has {pages}")


def _check_states(values: dict[str, list[int]], q_lens: list[int], num_slots: int | None) -> None:
    if "linear_state_indices" not in values:
        if "linear_state_write_indices" in values:
            raise ValueError("linear_state_write_indices is present without linear_state_indices")
        return
    for name in ("linear_state_indices", "linear_state_write_indices"):
        for i, slot in enumerate(values.get(name, ())):
            if slot < -1 or (num_slots is not None and slot >= num_slots):
                allowed = "a state slot" if num_slots is None else f"0 to {num_slots - 1}"
                raise ValueError(f"{name}[{i}] is {slot}; it must be -1 or {allowed}")
    name = "linear_state_write_indices" if "linear_state_write_indices" in values else "linear_state_indices"
    writer: dict[int, int] = {}
    for i, slot in enumerate(values[name]):
        if slot >= 0 and writer.setdefault(slot, i) != i:
            raise ValueError(f"{name}[{i}] is {slot}; sequences {writer[slot]} and {i} both write it")
    for i, slot in enumerate(values["linear_state_indices"]):
        if slot >= 0 and writer.get(slot, i) != i:
            raise ValueError(f"linear_state_indices[{i}] is {slot}, which sequence {writer[slot]} writes in this step")
    kv_lens = [high - low for low, high in pairwise(values["kv_cu_seq_lens"])]
    for i, initial in enumerate(values.get("has_initial_state", ())):
        if bool(initial) != (kv_lens[i] > q_lens[i]):
            raise ValueError(
                f"has_initial_state[{i}] is {bool(initial)}; sequence {i} has {max(kv_lens[i] - q_lens[i], 0)} tokens "
                "before this step's"
            )


def _check_positions(positions: list[int], values: dict[str, list[int]], q_lens: list[int], num_tokens: int) -> None:
    if len(positions) != num_tokens:
        raise ValueError(f"positions has {len(positions)} entries; T is {num_tokens}")
    kv_lens = [high - low for low, high in pairwise(values["kv_cu_seq_lens"])]
    expected = [
        (i, position)
        for i, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True))
        for position in range(kv_len - q_len, kv_len)
    ]
    for t, position in enumerate(positions):
        i, right = expected[t] if t < len(expected) else (-1, -1)
        if right < 0 and position != 0:
            raise ValueError(f"positions[{t}] is {position}; a padded row has position 0")
        if right >= 0 and position != right:
            raise ValueError(
                f"positions[{t}] is {position}; sequence {i}, of KV length {kv_lens[i]}, has position {right} there"
            )
