"""The C++ batch builder equals `xllm_metadata.build_attention_metadata`, CPU copies included. Also greedy sampling."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xllm_metadata import build_attention_metadata

Ask = Callable[[str, Any], Any]
Entry = dict[str, Any]


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[Entry]]:
    """(block_size, entries): prompts, chunks, decodes and empty sequences in any order, some with spare pages."""
    block_size = draw(st.sampled_from([1, 2, 16, 128]))
    step_kind = draw(st.sampled_from(["decode", "prompts", "mixed"]))
    lengths = {
        "decode": st.tuples(st.just(1), st.integers(0, 300)),
        "prompts": st.tuples(st.integers(0, 40), st.just(0)),
        "mixed": st.tuples(st.integers(0, 40), st.integers(0, 300)),
    }[step_kind]
    pairs = draw(st.lists(lengths, max_size=12))
    # Large batches repeat the drawn sequences: a list of 512 draws would exhaust what hypothesis may draw.
    pairs *= draw(st.sampled_from([1, 1, 1, 7])) if len(pairs) < 12 else 512 // 12
    spare = draw(st.integers(0, 2))
    shared = draw(st.booleans())
    seed = draw(st.integers(0, 2**32 - 1))
    return block_size, make_entries(pairs, block_size, spare, shared, random.Random(seed))


def make_entries(
    pairs: list[tuple[int, int]], block_size: int, spare: int, shared: bool, rng: random.Random
) -> list[Entry]:
    """One entry per (new, cached), with shuffled pages. `shared`: all entries share their full cached pages."""
    prefix = [10**6 + page for page in range(max((cached for _, cached in pairs), default=0) // block_size)]
    need = [-(-(new + cached) // block_size) + spare for new, cached in pairs]
    pages = list(range(sum(need) + 3))
    rng.shuffle(pages)
    entries = []
    for (new, cached), count in zip(pairs, need, strict=True):
        hit = cached // block_size if shared else 0
        entries.append(
            {
                "tokens": [rng.randrange(50_000) for _ in range(new)],
                "num_cached": cached,
                "blocks": prefix[:hit] + [pages.pop() for _ in range(count - hit)],
                "wants_logits": new > 0 and rng.random() < 0.7,
            }
        )
    return entries


def as_lists(metadata: Any) -> dict[str, Any]:
    fields = dataclasses.asdict(metadata)
    return {name: v.tolist() if isinstance(v, torch.Tensor) else v for name, v in fields.items()}


def check(ask: Ask, block_size: int, entries: list[Entry], slots: list[int] | None = None) -> None:
    """`slots`: of a model with states."""
    sent = [entry | {"state_slot": slot} for entry, slot in zip(entries, slots or [0] * len(entries), strict=True)]
    built = ask("batch", {"block_size": block_size, "entries": sent, "has_states": slots is not None})
    q_lens = [len(entry["tokens"]) for entry in entries]
    kv_lens = [entry["num_cached"] + q_len for entry, q_len in zip(entries, q_lens, strict=True)]
    tables = [entry["blocks"] for entry in entries]
    expected = build_attention_metadata(q_lens, kv_lens, tables, block_size, state_slots=slots)
    assert built["metadata"] == as_lists(expected)
    assert built["tokens"] == [token for entry in entries for token in entry["tokens"]]
    assert built["positions"] == [
        p for entry, kv_len in zip(entries, kv_lens, strict=True) for p in range(entry["num_cached"], kv_len)
    ]
    ends = [sum(q_lens[: i + 1]) for i in range(len(entries))]
    wanted = [end - 1 for end, entry in zip(ends, entries, strict=True) if entry["wants_logits"]]
    assert built["logits_indices"] == wanted
    assert built["is_aligned"]
    assert built["is_one_buffer"]


@settings(deadline=None, max_examples=300)
@given(batch=batches())
def test_agrees_with_the_reference_builder(ask: Ask, batch: tuple[int, list[Entry]]) -> None:
    check(ask, *batch)


@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_agrees_for_512_sequences(ask: Ask, block_size: int) -> None:
    rng = random.Random(7)
    pairs = [(rng.choice([0, 1, 1, 1, 33]), rng.randrange(200)) for _ in range(512)]
    check(ask, block_size, make_entries(pairs, block_size, 0, False, rng))


@pytest.mark.parametrize("num_sequences", [0, 1, 3, 4, 5, 33])
def test_state_slots_and_whether_they_hold_a_state(ask: Ask, num_sequences: int) -> None:
    rng = random.Random(num_sequences)
    pairs = [(rng.choice([1, 1, 5]), rng.choice([0, 0, 7])) for _ in range(num_sequences)]
    slots = rng.sample(range(100), num_sequences)
    check(ask, 4, make_entries(pairs, 4, 0, False, rng), slots)


def test_no_sequence(ask: Ask) -> None:
    check(ask, 16, [])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"tokens": [1] * 5, "num_cached": 12, "blocks": [3], "wants_logits": False},
            "a sequence of 17 tokens needs 2 pages and has 1",
        ),
        (
            {"tokens": [], "num_cached": 3, "blocks": [3], "wants_logits": True},
            "logits are wanted of a sequence without new tokens",
        ),
    ],
)
def test_an_inconsistent_entry_is_refused(ask: Ask, entry: Entry, message: str) -> None:
    assert ask("batch", {"block_size": 16, "entries": [entry]}) == {"error": message}


@pytest.mark.parametrize(("last", "fits"), [(2**24 - 1, True), (2**24, False)])
def test_kv_lengths_of_shared_pages_stay_within_int32(ask: Ask, last: int, fits: bool) -> None:
    lengths = [2**24] * 127 + [last]
    entries = [{"tokens": [1], "num_cached": n - 1, "blocks": [0], "wants_logits": True} for n in lengths]
    built = ask("batch", {"block_size": 2**24, "entries": entries})
    if fits:
        assert built["metadata"]["kv_seq_lens_host"][-1] == 2**31 - 1
    else:
        message = "the KV lengths of 128 sequences sum to 2147483648; at most 2147483647 fit into int32"
        assert built == {"error": message}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_takes_the_lowest_of_equal_logits_and_marks_nan(ask: Ask, dtype: str) -> None:
    rows = [[0, 3, 3, 1], [-1, -1, -1, -1], [0, None, 9, 1], [1, 2, 3, 4]]
    assert ask("sample", {"logits": rows, "vocab_size": 4, "dtype": dtype}) == [1, 0, -1, 3]


def test_greedy_over_no_row_and_over_a_large_vocabulary(ask: Ask) -> None:
    assert ask("sample", {"logits": [], "vocab_size": 4, "dtype": "float32"}) == []
    row = [0.0] * 49_152
    row[40_000] = row[40_001] = 2.0
    assert ask("sample", {"logits": [row], "vocab_size": len(row), "dtype": "float32"}) == [40_000]


@pytest.mark.parametrize(
    ("device", "steps", "kept"),
    [
        pytest.param("cpu", [[True, 0]] * 3, [[0], [1], [2]], id="a CPU step is complete at once"),
        pytest.param(
            *("privateuseone:0", [[True, 0], [True, 0], [True, 1], [True, 3]], [[0], [0, 1], [1, 2], [3]]),
            id="until the device has completed them",
        ),
        pytest.param(
            *("privateuseone:0", [[False, 0], [True, 0], [True, 0], [True, 1]], [[0], [0, 1], [0, 1, 2], [2, 3]]),
            id="a failed step is freed with the next",
        ),
    ],
)
def test_inputs_of_steps_are_kept_until_the_device_has_completed_them(
    ask: Ask, device: str, steps: list[list[Any]], kept: list[list[int]]
) -> None:
    """steps: (whether the step succeeds, number of successful steps that the device has completed before it)."""
    assert ask("in_flight", {"device": device, "steps": steps}) == kept


@pytest.mark.parametrize(
    ("token_ids", "row", "token_id"),
    [([97], 0, 97), ([0, -1, 97], 1, -1), ([5, 2**31 - 1], 1, 2**31 - 1), ([-(2**31)], 0, -(2**31))],
)
def test_token_ids_outside_the_vocabulary(ask: Ask, token_ids: list[int], row: int, token_id: int) -> None:
    message = f"tokens[{row}] is {token_id}; the vocabulary has 97 ids, 0 to 96"
    assert ask("token_ids", {"token_ids": token_ids, "vocab_size": 97}) == {"error": message}


@pytest.mark.parametrize("token_ids", [[], [0], [96, 0]])
def test_token_ids_in_the_vocabulary(ask: Ask, token_ids: list[int]) -> None:
    assert ask("token_ids", {"token_ids": token_ids, "vocab_size": 97}) is None
