"""Requests for the probe's scheduler, and the answers that the RecallModel gives to each of them alone."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

Case = dict[str, Any]

VOCAB = 50


def next_token(history: list[int], vocab_size: int = VOCAB) -> int:
    """The next token of the RecallModel: FNV-1a over all tokens."""
    value = 14695981039346656037
    for token in history:
        value = ((value ^ token) * 1099511628211) % 2**64
    return (value >> 32) % vocab_size


def expected_answer(case: Case, request: dict[str, Any]) -> tuple[list[int], str]:
    """(tokens, finish_reason) of the request without other requests and with enough memory."""
    history = list(request["token_ids"])
    answer: list[int] = []
    stops = set(request.get("stop_token_ids", []))
    if not request.get("ignore_eos", False):
        stops |= set(case["eos_token_ids"])
    longest = min(case["max_model_len"], case["num_blocks"] * case["block_size"] + 1)
    while True:
        token = next_token(history, case["vocab_size"])
        history.append(token)
        answer.append(token)
        if token in stops:
            return answer, "stop"
        if len(answer) == request["max_tokens"] or len(history) >= longest:
            return answer, "length"


@st.composite
def cases(draw: st.DrawFn) -> Case:
    vocab_size = draw(st.sampled_from([2, VOCAB]))  # with two token values many sequences share a prefix
    token = st.integers(0, vocab_size - 1)
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    num_blocks = draw(st.integers(1, 24))
    max_model_len = draw(st.integers(2, 60))
    max_seqs = draw(st.integers(1, 6))
    longest = min(max_model_len - 1, num_blocks * block_size)
    request = st.fixed_dictionaries(
        {
            "token_ids": st.lists(token, min_size=1, max_size=longest),
            "max_tokens": st.integers(1, 30),
        },
        optional={
            "stop_token_ids": st.lists(token, max_size=vocab_size // 2),
            "ignore_eos": st.booleans(),
        },
    )
    requests = draw(st.lists(request, min_size=1, max_size=10))
    arrivals = sorted(draw(st.lists(st.integers(0, 30), min_size=len(requests), max_size=len(requests))))
    return {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_seqs": max_seqs,
        "max_tokens": draw(st.integers(max_seqs, max_seqs + 20)),
        "max_mixed_prefill_tokens": draw(st.integers(1, 30)),
        "vocab_size": vocab_size,
        "enable_prefix_cache": draw(st.booleans()),
        "eos_token_ids": draw(st.lists(token, max_size=vocab_size // 2)),
        "requests": [
            {"arrival": arrival, "line": json.dumps({"id": f"r{i}", **request}), **request}
            for i, (arrival, request) in enumerate(zip(arrivals, requests, strict=True))
        ],
    }


def without_timing(event: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key != "timing"}


def case_of(requests: list[tuple[int, dict[str, Any]]], **changes: Any) -> Case:
    case = {
        "num_blocks": 100,
        "block_size": 4,
        "max_model_len": 200,
        "max_seqs": 8,
        "max_tokens": 16,
        "vocab_size": VOCAB,
        "eos_token_ids": [],
    }
    return {
        **case,
        **changes,
        "requests": [{"arrival": arrival, "line": json.dumps(request), **request} for arrival, request in requests],
    }
