"""Times in the events: of steps by kind in the stats, and of each request in its finish event."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from recall_cases import VOCAB, Case, case_of, cases

Ask = Callable[[str, Any], Any]
Event = dict[str, Any]

SETTINGS = {
    "num_blocks": 100,
    "block_size": 4,
    "max_model_len": 200,
    "max_seqs": 1,
    "max_tokens": 16,
    "vocab_size": VOCAB,
    "step_ms": 40,
}


def serve(run_probe: Callable[..., subprocess.CompletedProcess[str]], *lines: Event, **changes: Any) -> list[Event]:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    result = run_probe("serve", json.dumps({**SETTINGS, **changes}), stdin=text)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def timing(events: list[Event], name: str) -> dict[str, float | None]:
    (times,) = [event["timing"] for event in events if event.get("id") == name and event.get("finished")]
    assert list(times) == ["queue", "ttft", "tpot"]
    return dict(times)


def test_times_of_requests(run_probe: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """One sequence runs at a time, and a step takes 40 ms: first takes 5 steps, then second takes 3 (2 chunks)."""
    first = {"id": "first", "token_ids": [1], "max_tokens": 5}
    second = {"id": "second", "token_ids": [1] * 20, "max_tokens": 2}
    third = {"id": "third", "token_ids": [1], "max_tokens": 1}
    events = serve(run_probe, first, second, third)
    expected = {"first": (0, 0.04, 0.04), "second": (0.2, 0.28, 0.04), "third": (0.32, 0.36, None)}
    for name, (queue, ttft, tpot) in expected.items():
        times = timing(events, name)
        assert times["queue"] == pytest.approx(queue, rel=0.3, abs=0.03)
        assert times["ttft"] == pytest.approx(ttft, rel=0.3, abs=0.03)
        assert times["tpot"] == (None if tpot is None else pytest.approx(tpot, rel=0.3))
        assert times["queue"] <= times["ttft"]


def test_times_of_cancelled_requests(run_probe: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    never = {"id": "never", "token_ids": [1], "max_tokens": 5}
    events = serve(run_probe, {"command": "pause"}, never, {"command": "cancel", "id": "never"})
    assert timing(events, "never") == {"queue": None, "ttft": None, "tpot": None}


def test_step_counts(ask: Ask) -> None:
    """A prompt alone, then three steps with a chunk of the long prompt and a decode, then decodes."""
    short = {"id": "short", "token_ids": [1, 2, 3], "max_tokens": 8}
    long = {"id": "long", "token_ids": list(range(40)), "max_tokens": 2}
    steps = ask("schedule", case_of([(0, short), (1, long)]))["events"][-1]["scheduler"]["steps"]
    assert {kind: step["count"] for kind, step in steps.items()} == {"prefill": 1, "mixed": 3, "decode": 4}
    assert all(0 < step["seconds"] < 1 for step in steps.values())


def test_a_failed_step_counts(ask: Ask) -> None:
    bad = {"id": "bad", "token_ids": [13], "max_tokens": 3}
    stats = ask("schedule", case_of([(0, bad)], fail_on=13))["events"][-1]["scheduler"]
    assert (stats["num_steps"], stats["num_failed_steps"], stats["steps"]["prefill"]["count"]) == (1, 1, 1)


@settings(deadline=None, max_examples=100)
@given(case=cases())
def test_every_step_has_one_kind(ask: Ask, case: Case) -> None:
    result = ask("schedule", case)
    expected = {"prefill": 0, "mixed": 0, "decode": 0}
    for step in result["steps"]:
        decodes = [part["num_cached"] > 0 and part["num_tokens"] - part["num_cached"] == 1 for part in step]
        expected["decode" if all(decodes) else "mixed" if any(decodes) else "prefill"] += 1
    stats = result["events"][-1]["scheduler"]
    assert {kind: step["count"] for kind, step in stats["steps"].items()} == expected
    assert stats["num_steps"] == len(result["steps"])
    for event in result["events"]:
        if event.get("finished"):
            times = event["timing"]
            assert 0 <= times["queue"] <= times["ttft"]
            assert (times["tpot"] is None) == (event["completion_tokens"] == 1)


def test_the_worker_measures_its_steps(run: Callable[..., subprocess.CompletedProcess[str]], llama: Path) -> None:
    request = {"id": "r", "token_ids": [5, 6, 7], "max_tokens": 20, "ignore_eos": True}
    result = run(llama, [request], "--dtype=float32")
    assert result.returncode == 0, result.stderr
    times = timing([json.loads(line) for line in result.stdout.splitlines()], "r")
    assert None not in times.values()
    assert all(0 < seconds < 60 for seconds in times.values() if seconds is not None)
