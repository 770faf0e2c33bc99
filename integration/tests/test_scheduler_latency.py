"""Long prompts next to short ones: the gap between tokens of an answer is bounded, and short prompts are not stuck."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from recall_cases import case_of, next_token

Ask = Callable[[str, Any], Any]
Request = dict[str, Any]
Result = dict[str, Any]


def prompt(name: str, length: int, max_tokens: int = 1, first: int = 0) -> Request:
    return {"id": name, "token_ids": [(first + i) % 50 for i in range(length)], "max_tokens": max_tokens}


def run(ask: Ask, requests: list[tuple[int, Request]], **changes: Any) -> Result:
    """Runs the requests, and checks that each gets the tokens that it gets alone."""
    settings = {"num_blocks": 4000, "block_size": 4, "max_model_len": 8000, "max_tokens": 256, **changes}
    result: Result = ask("schedule", case_of(requests, **settings))
    for _, request in requests:
        history = list(request["token_ids"])
        for event in result["events"]:
            if event.get("id") == request["id"] and "token_ids" in event:
                assert event["token_ids"] == [next_token(history)]
                history += event["token_ids"]
        assert len(history) == len(request["token_ids"]) + request["max_tokens"]
    return result


def first_tokens(result: Result) -> list[str]:
    """The ids in the order of their first tokens."""
    return list(dict.fromkeys(event["id"] for event in result["events"] if "token_ids" in event))


def longest_gap(result: Result, name: str) -> int:
    """The most tokens that are computed from one token of the request to its next, its own included."""
    gaps, gap, has_begun = [0], 0, False
    for step in result["steps"]:
        gap += sum(part["num_new"] for part in step)
        if any(part["id"] == name and part["needs_token"] for part in step):
            gaps.append(gap if has_begun else 0)
            gap, has_begun = 0, True
    return max(gaps)


def first_token_step(result: Result, name: str) -> int:
    return next(
        i for i, step in enumerate(result["steps"]) for part in step if part["id"] == name and part["needs_token"]
    )


@pytest.mark.parametrize("limit", [1, 16, 64, 1000])
def test_the_longest_gap_of_a_decode_is_bounded(ask: Ask, limit: int) -> None:
    decodes = [(0, prompt(f"d{i}", 2, 60, first=i)) for i in range(3)]
    requests = [*decodes, (5, prompt("long", 900)), (6, prompt("longer", 1000, first=7)), (9, prompt("short", 8, 3))]
    result = run(ask, requests, max_mixed_prefill_tokens=limit)
    num_sequences = 6
    for name in ("d0", "d1", "d2"):
        assert longest_gap(result, name) <= min(256, limit + num_sequences)


def test_prompts_use_whole_steps_while_nothing_decodes(ask: Ask) -> None:
    result = run(ask, [(0, prompt("long", 1000, 2))], max_mixed_prefill_tokens=16)
    assert [sum(part["num_new"] for part in step) for step in result["steps"]] == [256, 256, 256, 232, 1]


@pytest.mark.parametrize("arrival", [0, 1, 5])
def test_a_short_prompt_passes_a_long_one(ask: Ask, arrival: int) -> None:
    result = run(ask, [(0, prompt("long", 6000)), (arrival, prompt("short", 20, 4, first=3))])
    assert first_tokens(result) == ["short", "long"]
    assert first_token_step(result, "short") == arrival


def test_short_prompts_pass_waiting_long_ones(ask: Ask) -> None:
    requests = [(0, prompt("l0", 4000)), (0, prompt("l1", 4000, first=1)), (0, prompt("middle", 1500, first=2))]
    result = run(ask, [*requests, (2, prompt("s0", 100, first=3)), (2, prompt("s1", 30, first=4))])
    assert first_tokens(result) == ["s1", "s0", "middle", "l0", "l1"]


def test_prompts_of_like_length_keep_their_order(ask: Ask) -> None:
    result = run(ask, [(0, prompt(f"r{i}", 1000 - 100 * i, first=i)) for i in range(4)])
    assert first_tokens(result) == ["r0", "r1", "r2", "r3"]
    assert max(len(step) for step in result["steps"]) <= 2


def test_a_long_prompt_does_not_starve(ask: Ask) -> None:
    """Short prompts come faster than they can be served. The long one gets half of each step's prompt tokens."""
    short = [(i // 4, prompt(f"s{i}", 60, 1, first=i)) for i in range(200)]
    result = run(ask, [(0, prompt("long", 2000)), *short])
    assert first_token_step(result, "long") <= 2000 // 128 + 1


def test_a_decode_and_a_long_prompt_and_short_ones(ask: Ask) -> None:
    """The long prompt takes half of 64 tokens per step; each short one begins at once."""
    requests = [(0, prompt("d", 2, 80)), (1, prompt("long", 2000, first=1))]
    requests += [(5 * i, prompt(f"s{i}", 20, 1, first=i)) for i in range(1, 6)]
    result = run(ask, requests, max_mixed_prefill_tokens=64)
    assert longest_gap(result, "d") <= 65
    assert first_tokens(result) == ["d", *(f"s{i}" for i in range(1, 6)), "long"]
    for i in range(1, 6):
        assert first_token_step(result, f"s{i}") == 5 * i


def test_pages_that_a_long_prompt_waits_for_are_not_taken(ask: Ask) -> None:
    """The long prompt is the oldest one and waits for pages: short ones that come later wait, too."""
    first = prompt("first", 40, 30)
    requests = [(0, first), (1, prompt("long", 160, first=1))]
    requests += [(i, prompt(f"s{i}", 4, 30, first=i)) for i in range(2, 12)]
    result = run(ask, requests, num_blocks=45, max_mixed_prefill_tokens=64)
    assert first_tokens(result)[:2] == ["first", "long"]
