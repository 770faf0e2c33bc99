"""Scheduler and engine over the RecallModel, whose answers depend on every cached token: a wrong page changes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from recall_cases import Case, case_of, cases, expected_answer, next_token, without_timing

Ask = Callable[[str, Any], Any]


@settings(deadline=None, max_examples=300)
@given(case=cases())
def test_every_request_gets_the_answer_that_it_gets_without_others(ask: Ask, case: Case) -> None:
    result = ask("schedule", case)
    tokens: defaultdict[str, list[int]] = defaultdict(list)
    finished = {}
    for event in result["events"][:-1]:
        if event.get("finished"):
            finished[event["id"]] = event
        else:
            assert event["id"] not in finished, "a token after the end"
            tokens[event["id"]] += event["token_ids"]
    for i, request in enumerate(case["requests"]):
        answer, reason = expected_answer(case, request)
        assert tokens[f"r{i}"] == answer
        assert without_timing(finished[f"r{i}"]) == {
            "id": f"r{i}",
            "finished": True,
            "finish_reason": reason,
            "prompt_tokens": len(request["token_ids"]),
            "completion_tokens": len(answer),
        }
    stats = result["events"][-1]["scheduler"]
    assert stats["num_free_blocks"] == case["num_blocks"]
    assert stats["num_finished"] == len(case["requests"])
    assert stats["num_running"] == stats["num_waiting"] == stats["num_failed_steps"] == 0


@settings(deadline=None, max_examples=300)
@given(case=cases())
def test_each_step_keeps_the_limits(ask: Ask, case: Case) -> None:
    arrival_order = {f"r{i}": i for i in range(len(case["requests"]))}
    steps = ask("schedule", case)["steps"]
    assert steps
    for step in steps:
        assert 0 < sum(part["num_new"] for part in step) <= case["max_tokens"]
        assert len(step) <= case["max_seqs"]
        assert len({part["id"] for part in step}) == len(step)
        check_pages(case, step)
        for part in step:
            end = part["num_cached"] + part["num_new"]
            assert part["num_new"] > 0
            assert end <= part["num_tokens"]
            assert end <= len(part["blocks"]) * case["block_size"]
            assert part["needs_token"] == (end == part["num_tokens"])
        decodes = [part["num_cached"] > 0 and part["num_tokens"] - part["num_cached"] == 1 for part in step]
        # With a prefix cache, a prompt whose last token alone is not cached looks like a decode among the prompts.
        if not case["enable_prefix_cache"]:
            assert decodes == sorted(decodes, reverse=True), "decodes come first"
            for kind in (True, False):
                order = [arrival_order[part["id"]] for part, d in zip(step, decodes, strict=True) if d == kind]
                assert order == sorted(order), "first come, first served"
            check_cuts(case, step[sum(decodes) :], sum(decodes))


def check_cuts(case: Case, prompts: list[dict[str, Any]], num_decodes: int) -> None:
    """A prompt is cut only because the step is full. The first cut one gets half of what earlier ones left, or more."""
    budget = case["max_tokens"] - num_decodes
    if num_decodes:
        budget = min(budget, case["max_mixed_prefill_tokens"])
    num_tokens = sum(part["num_new"] for part in prompts)
    assert num_tokens <= budget
    cut = [i for i, part in enumerate(prompts) if not part["needs_token"]]
    if not cut:
        return
    assert num_tokens == budget
    before = sum(part["num_new"] for part in prompts[: cut[0]])
    assert 2 * prompts[cut[0]]["num_new"] >= budget - before
    pending = [part["num_tokens"] - part["num_cached"] for part in prompts]
    assert all(2 * length <= pending[cut[0]] for length in pending[cut[0] + 1 :])


def check_pages(case: Case, step: list[dict[str, Any]]) -> None:
    """A page belongs to one sequence; or it is cached, shared by sequences with equal tokens, and not written."""
    size = case["block_size"]
    holders: dict[int, dict[str, Any]] = {}
    for part in step:
        assert all(0 <= page < case["num_blocks"] for page in part["blocks"])
        assert len(set(part["blocks"])) == len(part["blocks"])
        for i, page in enumerate(part["blocks"]):
            other = holders.setdefault(page, part)
            if other is part:
                continue
            end = (i + 1) * size
            assert case["enable_prefix_cache"]
            assert end <= min(part["num_cached"], other["num_cached"]), "a page of two sequences is written"
            assert part["tokens"][:end] == other["tokens"][:end], "a page holds different tokens for two sequences"
            assert other["blocks"][i] == page


def test_a_long_prompt_is_computed_in_chunks_together_with_decodes(ask: Ask) -> None:
    short = {"id": "short", "token_ids": [1, 2, 3], "max_tokens": 5}
    long = {"id": "long", "token_ids": list(range(40)), "max_tokens": 2}
    steps = ask("schedule", case_of([(0, short), (1, long)]))["steps"]
    shape = [[(part["id"], part["num_new"], part["needs_token"]) for part in step] for step in steps]
    assert shape == [
        [("short", 3, True)],
        [("short", 1, True), ("long", 15, False)],
        [("short", 1, True), ("long", 15, False)],
        [("short", 1, True), ("long", 10, True)],
        [("short", 1, True), ("long", 1, True)],
    ]


def test_the_youngest_is_preempted_and_resumes_without_losing_tokens(ask: Ask) -> None:
    old = {"id": "old", "token_ids": [1] * 8, "max_tokens": 9}
    young = {"id": "young", "token_ids": [2] * 7, "max_tokens": 9}
    result = ask("schedule", case_of([(0, old), (0, young)], num_blocks=5, block_size=4))
    assert result["events"][-1]["scheduler"]["num_preemptions"] >= 1
    recomputed = [part for step in result["steps"] for part in step if part["id"] == "young"]
    assert any(part["num_cached"] == 0 and part["num_tokens"] > 7 for part in recomputed)
    for request in (old, young):
        got = [t for event in result["events"] if event.get("id") == request["id"] for t in event.get("token_ids", [])]
        history = list(request["token_ids"])
        for token in got:
            assert token == next_token(history)
            history.append(token)
        assert len(got) == 9


def test_a_failing_step_fails_its_requests_only(ask: Ask) -> None:
    # Token 13 cannot be computed; "late" waits for pages while that step runs.
    bad = {"id": "bad", "token_ids": [13, 1], "max_tokens": 3}
    other = {"id": "other", "token_ids": [3, 4], "max_tokens": 3, "stop_token_ids": []}
    late = {"id": "late", "token_ids": [5], "max_tokens": 1}
    case = case_of([(0, bad), (0, other), (0, late)], max_seqs=2, max_tokens=4, fail_on=13)
    events = ask("schedule", case)["events"]
    errors = [event for event in events if "error" in event]
    message = "token 13 cannot be computed"
    assert errors == [
        {"id": "bad", "line": 1, "error": {"type": "internal", "message": message}},
        {"id": "other", "line": 2, "error": {"type": "internal", "message": message}},
    ]
    assert {"id": "late", "token_ids": [next_token([5])]} in events
    stats = events[-1]["scheduler"]
    assert (stats["num_failed_steps"], stats["num_free_blocks"]) == (1, 100)


def test_nan_logits_fail_their_request_only(ask: Ask) -> None:
    sick = {"id": "sick", "token_ids": [1, 17], "max_tokens": 3}
    well = {"id": "well", "token_ids": [3, 4], "max_tokens": 1}
    events = ask("schedule", case_of([(0, sick), (0, well)], nan_on=17))["events"]
    message = "the logits of token 2 are not numbers (NaN)"
    assert {"id": "sick", "line": 1, "error": {"type": "internal", "message": message}} in events
    assert {"id": "well", "token_ids": [next_token([3, 4])]} in events


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "prompt_len", "num_answer"),
    [(4, 100, 16, 1), (4, 100, 10, 7), (100, 12, 11, 1), (100, 12, 5, 7)],
)
def test_the_answer_ends_where_the_cache_or_the_context_ends(
    ask: Ask, num_blocks: int, max_model_len: int, prompt_len: int, num_answer: int
) -> None:
    request = {"id": "r", "token_ids": [1] * prompt_len, "max_tokens": 1000}
    case = case_of([(0, request)], num_blocks=num_blocks, max_model_len=max_model_len)
    final = ask("schedule", case)["events"][-2]
    assert (final["finish_reason"], final["completion_tokens"]) == ("length", num_answer)
