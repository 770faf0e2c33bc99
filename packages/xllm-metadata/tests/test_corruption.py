"""10,000 random corruptions of random legal steps.

validate accepts every step, and its error for a corruption names a field that the corruption changed.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from xllm_metadata import FIELDS, FieldType, Presence, build_attention_metadata, validate

PHASES = ("prefill", "chunked", "decode")
DEVICE_FIELDS = ("slot_mapping", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "kv_cu_seq_lens")
INDPTRS = {
    "paged_kv_indptr": "paged_kv_indptr_host",
    "kv_cu_seq_lens": "kv_seq_lens_host",
    "qo_indptr": "qo_indptr_host",
}
Corruption = Callable[[random.Random, Any, Any], Any]


def tensor_fields(step: Any) -> list[str]:
    return [f.name for f in FIELDS if f.type.is_tensor and getattr(step, f.name) is not None]


def changed(step: Any, names: tuple[str, ...], index: int, value: int) -> Any:
    """The step with element `index` of the named fields set to `value`; None when that changes nothing."""
    if not all(-len(getattr(step, name)) <= index < len(getattr(step, name)) for name in names):
        return None
    if all(int(getattr(step, name)[index]) == value for name in names):
        return None
    copies = {name: getattr(step, name).clone() for name in names}
    for tensor in copies.values():
        tensor[index] = value
    return dataclasses.replace(step, **copies)


def wrong_dtype(rng: random.Random, batch: Any, step: Any) -> Any:
    name = rng.choice(tensor_fields(step))
    dtype = rng.choice([torch.int64, torch.int16, torch.float32, torch.bool])
    return dataclasses.replace(step, **{name: getattr(step, name).to(dtype)})


def wrong_device(rng: random.Random, batch: Any, step: Any) -> Any:
    name = rng.choice(tensor_fields(step))
    return dataclasses.replace(step, **{name: getattr(step, name).to("meta")})


def wrong_rank(rng: random.Random, batch: Any, step: Any) -> Any:
    name = rng.choice(tensor_fields(step))
    return dataclasses.replace(step, **{name: getattr(step, name)[None]})


def wrong_length(rng: random.Random, batch: Any, step: Any) -> Any:
    name = rng.choice(tensor_fields(step))
    tensor = getattr(step, name)
    other = tensor[:-1] if len(tensor) and rng.random() < 0.5 else torch.cat([tensor, tensor.new_zeros(1)])
    return dataclasses.replace(step, **{name: other.clone()})


def absent(rng: random.Random, batch: Any, step: Any) -> Any:
    return dataclasses.replace(step, **{rng.choice(tensor_fields(step)): None})


def decreasing_indptr(rng: random.Random, batch: Any, step: Any) -> Any:
    name = rng.choice([name for name in INDPTRS if getattr(step, name) is not None])
    index = rng.randrange(1, len(getattr(step, name)))
    before = int(getattr(step, name)[index - 1])
    return changed(step, (name, INDPTRS[name]), index, before - rng.randint(1, 5))


def indptr_off_zero(rng: random.Random, batch: Any, step: Any) -> Any:
    name = rng.choice([name for name in INDPTRS if getattr(step, name) is not None])
    return changed(step, (name, INDPTRS[name]), 0, rng.choice([-1, 1, 3]))


def other_kv_length(rng: random.Random, batch: Any, step: Any) -> Any:
    index = rng.randrange(1, len(step.kv_cu_seq_lens))
    value = int(step.kv_cu_seq_lens[index]) + rng.choice([-1, 1, batch.page_size])
    return changed(step, ("kv_cu_seq_lens", "kv_seq_lens_host"), index, value)


def page_out_of_range(rng: random.Random, batch: Any, step: Any) -> Any:
    if not len(step.paged_kv_indices):
        return None
    value = rng.choice([-1, batch.num_pages, 2**31 - 1])
    return changed(step, ("paged_kv_indices",), rng.randrange(len(step.paged_kv_indices)), value)


def slot_out_of_range(rng: random.Random, batch: Any, step: Any) -> Any:
    if not len(step.slot_mapping):
        return None
    value = rng.choice([-2, batch.num_pages * batch.page_size, 2**31 - 1])
    return changed(step, ("slot_mapping",), rng.randrange(len(step.slot_mapping)), value)


def slot_off_its_page_table(rng: random.Random, batch: Any, step: Any) -> Any:
    if not len(step.slot_mapping):
        return None
    value = rng.randrange(-1, batch.num_pages * batch.page_size)
    return changed(step, ("slot_mapping",), rng.randrange(len(step.slot_mapping)), value)


def two_writers(rng: random.Random, batch: Any, step: Any) -> Any:
    """The last page of one writing sequence becomes that of another, at the same offset."""
    pairs = [
        (i, j)
        for i in range(len(batch.q_lens))
        for j in range(len(batch.q_lens))
        if i != j and batch.q_lens[i] and batch.q_lens[j]
        and (batch.kv_lens[i] - 1) % batch.page_size == (batch.kv_lens[j] - 1) % batch.page_size
    ]  # fmt: skip
    if not pairs:
        return None
    i, j = rng.choice(pairs)
    tables = [list(table) for table in batch.page_tables]
    last_i, last_j = ((batch.kv_lens[s] - 1) // batch.page_size for s in (i, j))
    tables[i][last_i] = tables[j][last_j]
    return build_attention_metadata(batch.q_lens, batch.kv_lens, tables, batch.page_size)


def last_page_len_off(rng: random.Random, batch: Any, step: Any) -> Any:
    index = rng.randrange(len(step.paged_kv_last_page_len))
    value = rng.randint(-1, batch.page_size + 1)
    return changed(step, ("paged_kv_last_page_len", "paged_kv_last_page_len_host"), index, value)


def mirror_differs(rng: random.Random, batch: Any, step: Any) -> Any:
    name = rng.choice([name for name in tensor_fields(step) if name.endswith("_host")])
    index = rng.randrange(len(getattr(step, name)))
    return changed(step, (name,), index, int(getattr(step, name)[index]) + rng.choice([-1, 1]))


def illegal_flags(rng: random.Random, batch: Any, step: Any) -> Any:
    return dataclasses.replace(step, is_prefill=True, is_chunked_prefill=True)


def wrong_maximum(rng: random.Random, batch: Any, step: Any) -> Any:
    name = rng.choice(["max_query_len", "max_seq_len"])
    return dataclasses.replace(step, **{name: getattr(step, name) + rng.choice([-1, 1])})


CORRUPTIONS: tuple[Corruption, ...] = (
    wrong_dtype, wrong_device, wrong_rank, wrong_length, absent, decreasing_indptr, indptr_off_zero, other_kv_length,
    page_out_of_range, slot_out_of_range, slot_off_its_page_table, two_writers, last_page_len_off, mirror_differs,
    illegal_flags, wrong_maximum,
)  # fmt: skip


def changed_fields(step: Any, corrupted: Any) -> list[str]:
    """Fields that the corruption replaced. Corruptions share all other objects with the step, but for `two_writers`."""
    names = [field.name for field in FIELDS if getattr(step, field.name) is not getattr(corrupted, field.name)]
    return [name for name in names if not same(getattr(step, name), getattr(corrupted, name))]


def same(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return bool(ours == theirs)
    return (ours.dtype, ours.device, ours.shape) == (theirs.dtype, theirs.device, theirs.shape) and torch.equal(
        ours, theirs
    )


def test_every_corruption_is_rejected_and_every_step_accepted(random_batch: Callable[..., Any]) -> None:
    rng = random.Random(1)
    done: Counter[str] = Counter()
    while done.total() < 10_000:
        batch = random_batch(rng, rng.choice(PHASES), rng.choice([1, 4, 16]), rng.randint(1, 6), 40)
        step = build_attention_metadata(batch.q_lens, batch.kv_lens, batch.page_tables, batch.page_size)
        limits = {
            "num_tokens": len(step.slot_mapping),
            "num_seqs": len(batch.q_lens),
            "num_pages": batch.num_pages,
            "page_size": batch.page_size,
        }
        validate(step, **limits)
        for corrupt in CORRUPTIONS:
            corrupted = corrupt(rng, batch, step)
            if corrupted is None:
                continue
            named = "|".join(changed_fields(step, corrupted))
            with pytest.raises(ValueError, match=rf"\b({named})\b"):
                validate(corrupted, **limits)
            done[corrupt.__name__] += 1
    assert len(done) == len(CORRUPTIONS)
    assert min(done.values()) >= 200, done


def test_the_corruptions_know_every_always_present_tensor() -> None:
    """So that a new field is corrupted too: the helpers above read the table, except for the indptrs."""
    always = {f.name for f in FIELDS if f.presence is not Presence.OPTIONAL and f.type is FieldType.INT32_TENSOR}
    assert always == {*DEVICE_FIELDS, "qo_indptr", *(f"{n}_host" for n in ("paged_kv_indptr", "paged_kv_last_page_len",
                      "qo_indptr", "kv_seq_lens"))}  # fmt: skip
