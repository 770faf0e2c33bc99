"""Prefix cache hits of an engine over the RecallModel, whose answers depend on every cached token."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

Ask = Callable[[str, Any], Any]
Run = Callable[..., "Outcome"]

VOCAB, PAGE = 50, 4
FIRST = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]  # three pages
OTHER = [31, 32, 33, 34, 35, 36]


def next_token(history: list[int]) -> int:
    """The next token of the RecallModel: FNV-1a over all tokens."""
    value = 14695981039346656037
    for token in history:
        value = ((value ^ token) * 1099511628211) % 2**64
    return (value >> 32) % VOCAB


def answer_to(prompt: list[int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(prompt) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of an engine run."""

    steps: list[list[dict[str, Any]]]
    answers: dict[str, list[int]]
    scheduler: dict[str, Any]

    def parts(self, name: str) -> list[tuple[int, int]]:
        """(cached tokens, new tokens) of the request in each step that computed it."""
        return [(part["num_cached"], part["num_new"]) for step in self.steps for part in step if part["id"] == name]

    @property
    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = self.scheduler["prefix_cache"]
        return counts


@pytest.fixture
def run(ask: Ask) -> Run:
    """`run((arrival, name, prompt, max_tokens), ..., failing={...}, **settings)`: checks failures and other answers."""

    def run_requests(
        *requests: tuple[int, str, list[int], int], failing: frozenset[str] | set[str] = frozenset(), **changes: Any
    ) -> Outcome:
        lines = [{"id": name, "token_ids": prompt, "max_tokens": count} for _, name, prompt, count in requests]
        settings = {
            "num_blocks": 100, "block_size": PAGE, "max_model_len": 200, "max_seqs": 8, "max_tokens": 64,
            "vocab_size": VOCAB, "enable_prefix_cache": True, **changes,
            "requests": [{"arrival": r[0], "line": json.dumps(line)} for r, line in zip(requests, lines, strict=True)],
        }  # fmt: skip
        result = ask("schedule", settings)
        answers: defaultdict[str, list[int]] = defaultdict(list)
        for event in result["events"]:
            if "token_ids" in event:
                answers[event["id"]] += event["token_ids"]
        failed = {event["id"] for event in result["events"] if "error" in event}
        assert failed == failing
        expected = {name: answer_to(prompt, count) for _, name, prompt, count in requests if name not in failing}
        assert {name: tokens for name, tokens in answers.items() if name not in failing} == expected
        scheduler = result["events"][-1]["scheduler"]
        assert scheduler["num_free_blocks"] == settings["num_blocks"]
        return Outcome(steps=result["steps"], answers=dict(answers), scheduler=scheduler)

    return run_requests


SECOND_PROMPTS = {
    "nothing": (OTHER, 0),
    "less than a page": ([*FIRST[:3], *OTHER], 0),
    "a page": ([*FIRST[:4], *OTHER], 4),
    "part of a page more": ([*FIRST[:10], *OTHER], 8),
    "all of it": (FIRST, 8),  # its last token is computed, and with it the last page
    "all but a token of a page": (FIRST[:8], 4),
    "all of it and more": ([*FIRST, 40], 12),
    "only later pages": ([40, *FIRST[1:]], 0),
    "pages in another order": ([*FIRST[4:8], *FIRST[:4], 40], 0),
    # 12 tokens of the prompt and 6 of 7 of the answer are written: the last one was never an input.
    "the next turn": ([*FIRST, *answer_to(FIRST, 7), *OTHER], 16),
    "the next turn, ending in a page": ([*FIRST, *answer_to(FIRST, 5)[:4]], 12),
}


@pytest.mark.parametrize(("prompt", "num_hit"), SECOND_PROMPTS.values(), ids=SECOND_PROMPTS)
def test_a_common_prefix_is_not_computed_again(run: Run, prompt: list[int], num_hit: int) -> None:
    requests = (0, "first", FIRST, 7), (20, "second", prompt, 6)
    outcome = run(*requests)
    assert outcome.parts("second")[0] == (num_hit, len(prompt) - num_hit)
    assert outcome.counts["num_hit_tokens"] == num_hit
    assert outcome.counts["num_queried_tokens"] == len(FIRST) + len(prompt)
    assert outcome.counts["num_evicted_blocks"] == 0
    num_computed = outcome.scheduler["num_computed_tokens"]
    off = run(*requests, enable_prefix_cache=False)
    assert off.scheduler["num_computed_tokens"] - num_computed == num_hit
    assert off.scheduler["prefix_cache"] == dict.fromkeys(outcome.counts, 0)
    assert off.answers == outcome.answers


def test_a_page_is_shared_while_its_sequence_runs(run: Run) -> None:
    outcome = run((0, "first", FIRST, 20), (5, "second", [*FIRST, 40], 9))
    assert outcome.parts("second")[0] == (12, 1)
    tables = [{part["id"]: part["blocks"] for part in step} for step in outcome.steps]
    both = [table for table in tables if len(table) == 2]
    assert len(both) == 9
    for table in both:
        assert table["first"][:3] == table["second"][:3]
        assert not set(table["first"][3:]) & set(table["second"][3:])


def test_equal_pages_of_one_step_are_merged(run: Run) -> None:
    outcome = run((0, "a", FIRST, 4), (0, "b", FIRST, 4), (0, "c", [*FIRST[:8], *OTHER], 4))
    assert [outcome.parts(name)[0] for name in "abc"] == [(0, 12), (0, 12), (0, 14)]
    first, second = outcome.steps[:2]
    pages = [page for part in first for page in part["blocks"]]
    assert len(set(pages)) == len(pages)  # no page is shared before it is written
    a, b, c = (part["blocks"] for part in second)
    assert a[:3] == b[:3]
    assert a[:2] == c[:2]


def test_a_page_is_hit_as_soon_as_its_chunk_is_computed(run: Run) -> None:
    prompt = list(range(40))
    outcome = run((0, "first", prompt, 2), (1, "second", prompt, 2), max_tokens=16)
    assert outcome.parts("first")[:3] == [(0, 16), (16, 16), (32, 8)]
    assert outcome.parts("second")[:2] == [(32, 8), (40, 1)]  # in the step that computes the last 8 of the first


def test_a_hit_is_followed_by_chunks(run: Run) -> None:
    prompt = [*FIRST, *range(20)]
    outcome = run((0, "first", FIRST, 1), (5, "second", prompt, 2), max_tokens=8)
    assert outcome.parts("second") == [(12, 8), (20, 8), (28, 4), (32, 1)]


@pytest.mark.parametrize("others", [["x"], ["x", "y"]])
def test_a_failed_step_leaves_no_page(run: Run, others: list[str]) -> None:
    """Token 48 cannot be computed. The other requests of that step write no pages either: a retry hits nothing."""
    prompts = {"x": [5, 6, 7, 8, 9, 10], "y": [5, 6, 7, 8, 9, 11]}
    requests = [(0, "bad", [1, 2, 3, 4, 48], 3), *((0, name, prompts[name], 3) for name in others)]
    again = [(9, f"{name} again", prompts[name], 3) for name in others]
    outcome = run(*requests, *again, (15, "like bad", [1, 2, 3, 4, 14], 3), failing={"bad", *others}, fail_on=48)
    assert [outcome.parts(name)[0][0] for _, name, *_ in again] == [0] * len(again)
    assert outcome.parts("like bad")[0] == (0, 5)


def test_a_failed_request_evicts_the_pages_that_only_it_used(run: Run) -> None:
    """It fails in its second chunk. The first page of its first chunk was a hit."""
    bad = [*FIRST[:4], 1, 2, 3, 4, 5, 6, 7, 48]
    requests = (0, "first", FIRST, 1), (3, "bad", bad, 1), (9, "like bad", [*bad[:8], 40], 1)
    outcome = run(*requests, failing={"bad"}, fail_on=48, max_tokens=6)
    assert outcome.parts("bad") == [(4, 6), (10, 2)]
    assert outcome.parts("like bad")[0] == (4, 5)  # the first page stays: it has child pages of the first request


def test_nan_logits_leave_no_page(run: Run) -> None:
    sick = [1, 2, 3, 4, 5, 6, 7, 47]
    outcome = run((0, "sick", sick, 3), (5, "well", [*sick, 9], 3), failing={"sick"}, nan_on=47)
    assert outcome.parts("well")[0] == (0, 9)


def test_nan_logits_take_pages_from_the_cache_that_others_use(run: Run) -> None:
    """Both running requests that read a page of the sick one are computed again, and no later request hits it."""
    sick = [*FIRST[:8], 5, 6, 7, 47]
    requests = [(0, "first", FIRST, 9), (0, "other", OTHER, 9), (2, "sick", sick, 3), (2, "child", [*FIRST, 1], 9)]
    outcome = run(*requests, (6, "later", [*FIRST, 2], 2), failing={"sick"}, nan_on=47)
    assert outcome.parts("sick") == [(8, 4)]
    # The step of the sick request is the second of both. Their tokens until then are kept.
    assert outcome.parts("first")[:5] == [(0, 12), (12, 1), (13, 1), (0, 15), (15, 1)]
    assert outcome.parts("child")[:2] == [(12, 1), (0, 14)]
    assert outcome.parts("other") == [(0, 6), *((count, 1) for count in range(6, 14))]
    assert outcome.scheduler["num_preemptions"] == 2
    assert outcome.parts("later")[0] == (12, 1)  # of the pages that were computed again


def test_nan_logits_take_pages_that_follow_from_the_cache(run: Run) -> None:
    """The page after those of the sick request belongs to a request that is finished."""
    long = [*FIRST, *range(4)]
    outcome = run((0, "done", [*long, 3], 1), (4, "sick", [*FIRST[:8], 47], 1), (8, "again", [*long, 4], 1),
                  failing={"sick"}, nan_on=47)  # fmt: skip
    assert outcome.parts("sick") == [(8, 1)]
    assert outcome.parts("again")[0] == (0, 17)


def test_requests_computed_again_keep_their_order(run: Run) -> None:
    """With room for two, the older of those that wait comes first."""
    other = [*OTHER, *range(40, 47)]  # as long as b's prompt, so that it does not pass that
    requests = [(0, "a", FIRST, 12), (0, "sick", [*FIRST[:8], 1, 47], 1), (1, "b", [*FIRST, 3], 6), (2, "c", other, 4)]
    outcome = run(*requests, failing={"sick"}, nan_on=47, max_seqs=2, max_tokens=12)
    firsts = {
        name: next(i for i, step in enumerate(outcome.steps) if any(p["id"] == name for p in step)) for name in "abc"
    }
    assert firsts["a"] < firsts["b"] < firsts["c"]


def test_a_preempted_sequence_resumes_from_its_remaining_pages(run: Run) -> None:
    requests = (0, "old", FIRST[:8], 9), (0, "young", [2] * 7, 9)
    outcome = run(*requests, num_blocks=5)
    assert outcome.scheduler["num_preemptions"] == 1
    # It freed two pages. The old sequence's fourth page evicted the second of them; the first is its parent.
    resumed = [part for part in outcome.parts("young") if part[1] > 1]
    assert resumed == [(0, 7), (4, 5)]
    # The young sequence then evicted three of the four pages of the old one.
    assert outcome.counts == {
        "num_queried_tokens": 8 + 7 + 9, "num_hit_tokens": 4, "num_evicted_blocks": 4, "num_cached_blocks": 4,
    }  # fmt: skip


def test_the_least_recently_used_page_is_evicted_first_and_leaves_before_parents(run: Run) -> None:
    prompts = {name: [10 * i + j for j in range(9)] for i, name in enumerate("abc")}  # two full pages each
    # c takes the two free pages and the last page of a, which is older than b.
    before = [(0, "a", prompts["a"], 1), (5, "b", prompts["b"], 1), (10, "c", prompts["c"], 1)]
    assert run(*before, num_blocks=6).counts["num_evicted_blocks"] == 1
    after = run(*before, (15, "a again", prompts["a"], 1), (20, "b again", prompts["b"], 1), num_blocks=6)
    assert after.parts("a again")[0] == (4, 5)
    assert after.parts("b again")[0] == (4, 5)
    touching = (7, "a again", prompts["a"], 1), (15, "a at last", prompts["a"], 1)
    touched = run(*before[:2], touching[0], before[2], touching[1], num_blocks=6)
    assert touched.parts("a at last")[0] == (8, 1)


def test_cached_pages_count_as_free(run: Run) -> None:
    """Ten prompts one after the other, each filling the whole cache; then two that share three pages."""
    fill = [[i, *range(15)] for i in range(10)]
    outcome = run(*((3 * i, f"r{i}", prompt, 1) for i, prompt in enumerate(fill)), num_blocks=4)
    assert outcome.counts["num_evicted_blocks"] == 4 * 9
    assert outcome.counts["num_cached_blocks"] == 4
    # Two that share three pages fit into five, where four and four would not.
    together = run((0, "x", FIRST, 4), (1, "y", [*FIRST, 40], 3), num_blocks=5)
    assert together.parts("y")[0] == (12, 1)
    assert len(together.steps[1]) == 2
