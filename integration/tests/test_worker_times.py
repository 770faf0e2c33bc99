"""Times in the events: of steps by kind in the stats, and of each request in its finish event."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
STEP = 0.04 - 1e-6  # seconds; the events round
ARRIVALS = 0.1  # seconds; most between the arrivals of the lines of one write


def serve(run_probe: Callable[..., subprocess.CompletedProcess[str]], *lines: Event, **changes: Any) -> list[Event]:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    result = run_probe("serve", json.dumps({**SETTINGS, **changes}), stdin=text)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def timing(events: list[Event], name: str) -> dict[str, Any]:
    (times,) = [event["timing"] for event in events if event.get("id") == name and event.get("finished")]
    assert list(times) == ["queue", "ttft", "tpot"]
    return dict(times)


def test_times_of_requests(probe_path: Path) -> None:
    """One sequence runs at a time: first takes 5 steps, then second takes 3 (its prompt has 2 chunks), then third 1.

    A step takes at least 40 ms. On a busy machine it takes longer, so the upper bounds are other times of the same run.
    """
    first = {"id": "first", "token_ids": [1], "max_tokens": 5}
    second = {"id": "second", "token_ids": [1] * 20, "max_tokens": 2}
    third = {"id": "third", "token_ids": [1], "max_tokens": 1}
    began = time.monotonic()
    command = [probe_path, "serve", json.dumps(SETTINGS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as probe:
        assert probe.stdin is not None
        assert probe.stdout is not None
        probe.stdin.write("".join(json.dumps(line) + "\n" for line in (first, second, third)))
        probe.stdin.flush()
        events: list[Event] = []
        while sum(bool(event.get("finished")) for event in events) < 3:
            events.append(json.loads(probe.stdout.readline()))
        whole = time.monotonic() - began
        probe.stdin.write('{"command": "stats"}\n')
        probe.stdin.close()
        steps = json.loads(probe.stdout.readline())["scheduler"]["steps"]
    one, two, three = ({**timing(events, name)} for name in ("first", "second", "third"))
    assert three.pop("tpot") is None
    prompts = [times["ttft"] - times["queue"] for times in (one, two, three)]
    decodes = [4 * one["tpot"], 1 * two["tpot"]]
    for seconds, num_steps in zip((*prompts, *decodes), (1, 2, 1, 4, 1), strict=True):
        assert seconds >= num_steps * STEP
    # Time in steps is a part of the requests' times, and these follow each other.
    assert steps["prefill"]["seconds"] >= 4 * STEP
    assert steps["decode"]["seconds"] >= 5 * STEP
    assert sum(prompts) >= steps["prefill"]["seconds"]
    assert sum(decodes) >= steps["decode"]["seconds"]
    assert sum(prompts) + sum(decodes) <= whole
    # A request waits for those before it. All were sent in one write, so they arrived at nearly the same time.
    assert one["queue"] >= 0
    assert two["queue"] >= one["ttft"] + decodes[0] - ARRIVALS
    assert three["queue"] >= two["ttft"] + decodes[1] - ARRIVALS
    assert three["ttft"] <= whole


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
