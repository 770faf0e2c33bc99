"""The cancel command: the request ends with its usage, its pages are free, and all others get their own tokens."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recall_cases import VOCAB, Case, case_of, cases, expected_answer, next_token

Ask = Callable[[str, Any], Any]
Event = dict[str, Any]

SETTINGS = {
    "num_blocks": 100,
    "block_size": 4,
    "max_model_len": 200,
    "max_seqs": 2,
    "max_tokens": 16,
    "vocab_size": VOCAB,
}


def cancel(name: str) -> Event:
    return {"command": "cancel", "id": name}


def request(name: str, num_tokens: int = 5, max_tokens: int = 20, first: int = 1) -> Event:
    return {"id": name, "token_ids": [first] * num_tokens, "max_tokens": max_tokens}


def of(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event.get("id") == name]


def usage(events: list[Event], name: str) -> tuple[str, int, int]:
    """(finish_reason, prompt_tokens, completion_tokens); the count of tokens is checked."""
    final = of(events, name)[-1]
    assert final["completion_tokens"] == sum(len(event.get("token_ids", [])) for event in of(events, name))
    return final["finish_reason"], final["prompt_tokens"], final["completion_tokens"]


# (arrival, line)s -> (finish_reason, prompt_tokens, completion_tokens) of r
LONG = {"id": "r", "token_ids": list(range(40)), "max_tokens": 5}
STATES: dict[str, tuple[list[tuple[int, Event]], dict[str, Any], tuple[str, int, int]]] = {
    "before its first step": ([(0, request("r")), (0, cancel("r"))], {}, ("cancelled", 5, 0)),
    "waiting": (
        [(0, request("a")), (0, request("b")), (0, request("r")), (3, cancel("r"))],
        {},
        ("cancelled", 5, 0),
    ),
    "in the middle of its prompt": ([(0, LONG), (2, cancel("r"))], {}, ("cancelled", 40, 0)),
    "decoding": ([(0, request("r")), (4, cancel("r"))], {}, ("cancelled", 5, 4)),
    "preempted": (
        [(0, request("a", 8, 12, 1)), (0, request("r", 7, 12, 2)), (8, cancel("r"))],
        {"num_blocks": 5},
        ("cancelled", 7, 2),
    ),
}


@pytest.mark.parametrize("enable_prefix_cache", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_each_state_of_a_request(ask: Ask, state: str, enable_prefix_cache: bool) -> None:
    lines, changes, expected = STATES[state]
    case = case_of(lines, max_seqs=2, enable_prefix_cache=enable_prefix_cache, **changes)
    result = ask("schedule", case)
    if state == "preempted":
        assert "r" not in [part["id"] for part in result["steps"][7]]
    assert usage(result["events"], "r") == expected
    for name in ("a", "b"):
        for event in of(result["events"], name)[-1:]:
            assert event["finish_reason"] == "length"
    stats = result["events"][-1]["scheduler"]
    assert (stats["num_cancelled"], stats["num_running"], stats["num_waiting"]) == (1, 0, 0)
    assert stats["num_free_blocks"] == case["num_blocks"]


def test_no_token_follows_a_cancel_and_the_id_is_free(ask: Ask) -> None:
    again = {**request("r"), "max_tokens": 2}
    events = ask("schedule", case_of([(0, request("r")), (3, cancel("r")), (3, again)]))["events"]
    kinds = ["token" if "token_ids" in event else event["finish_reason"] for event in of(events, "r")]
    assert kinds == ["token"] * 3 + ["cancelled", "token", "token", "length"]


@pytest.mark.parametrize(
    "lines",
    [
        [(0, cancel("r"))],
        [(0, cancel("r")), (0, request("r", max_tokens=1))],
        [(0, request("r", max_tokens=1)), (5, cancel("r"))],
        [(0, request("r")), (2, cancel("r")), (2, cancel("r"))],
    ],
)
def test_a_request_that_is_not_there(ask: Ask, lines: list[tuple[int, Event]]) -> None:
    events = ask("schedule", case_of(lines))["events"]
    (error,) = [event for event in events if "error" in event]
    assert error["id"] == "r"
    assert error["error"] == {"type": "not_found", "message": 'id "r" belongs to no waiting or running request'}
    assert sum(bool(event.get("finished")) for event in events) == sum(
        "id" in line and "token_ids" in line for _, line in lines
    )


def test_pages_of_a_cancelled_prompt_stay_in_the_prefix_cache(ask: Ask) -> None:
    """Only those that a step has computed: 32 tokens of two steps."""
    later = {"id": "later", "token_ids": list(range(40)), "max_tokens": 2}
    case = case_of([(0, LONG), (2, cancel("r")), (3, later)], enable_prefix_cache=True)
    result = ask("schedule", case)
    assert result["events"][-1]["scheduler"]["prefix_cache"]["num_hit_tokens"] == 32
    history = list(later["token_ids"])
    for event in of(result["events"], "later")[:-1]:
        assert event["token_ids"] == [next_token(history)]
        history += event["token_ids"]
    assert usage(result["events"], "later") == ("length", 40, 2)


@settings(deadline=None, max_examples=200)
@given(data=st.data(), case=cases())
def test_any_cancels_leave_the_other_answers_alone(ask: Ask, data: st.DataObject, case: Case) -> None:
    names = [f"r{i}" for i in range(len(case["requests"]))]
    cancels = data.draw(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(names)), min_size=1, max_size=8))
    lines = [(entry["arrival"], 0, entry["line"]) for entry in case["requests"]]
    lines += [(arrival, 1, json.dumps(cancel(name))) for arrival, name in cancels]
    requests = [{"arrival": arrival, "line": line} for arrival, _, line in sorted(lines, key=lambda line: line[:2])]
    events = ask("schedule", {**case, "requests": requests})["events"]
    num_cancelled = 0
    for name, entry in zip(names, case["requests"], strict=True):
        answer, reason = expected_answer(case, entry)
        mine = [event for event in of(events, name) if "error" not in event]
        tokens = [token for event in mine for token in event.get("token_ids", [])]
        got_reason = usage(mine, name)[0]
        if got_reason == "cancelled":
            num_cancelled += 1
            assert name in {name for _, name in cancels}
            assert tokens == answer[: len(tokens)]
        else:
            assert (tokens, got_reason) == (answer, reason)
    stats = events[-1]["scheduler"]
    assert stats["num_free_blocks"] == case["num_blocks"]
    assert stats["num_cancelled"] == num_cancelled
    assert stats["num_finished"] == len(names) - num_cancelled


BAD: list[tuple[Event, str]] = [
    ({"command": "cancel"}, 'key "id" is missing'),
    ({"command": "cancel", "id": 7}, "id is 7; expected a string of 1 to 256 bytes"),
    ({"command": "cancel", "id": "a", "token_ids": [1]}, 'unknown key "token_ids"; allowed: command, id'),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_malformed_cancel(ask: Ask, line: Event, message: str) -> None:
    events = ask("schedule", case_of([(0, request("r", max_tokens=1)), (0, line)]))["events"]
    (error,) = [event for event in events if "error" in event]
    assert error["error"] == {"type": "invalid_request", "message": message}
    assert usage(events, "r") == ("length", 5, 1)


@pytest.fixture
def serving(probe_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    probes: list[subprocess.Popen[str]] = []

    def start(**changes: Any) -> subprocess.Popen[str]:
        command = [str(probe_path), "serve", json.dumps({**SETTINGS, **changes})]
        probes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return probes[-1]

    yield start
    for probe in probes:
        probe.kill()
        probe.communicate()


def write(process: subprocess.Popen[str], *lines: Event) -> None:
    assert process.stdin is not None
    process.stdin.write("".join(json.dumps(line) + "\n" for line in lines))
    process.stdin.flush()


def read(process: subprocess.Popen[str]) -> Event:
    assert process.stdout is not None
    event: Event = json.loads(process.stdout.readline())
    return event


def test_a_cancel_while_its_step_runs(serving: Callable[..., subprocess.Popen[str]]) -> None:
    """The token of that step still comes, then the end."""
    probe = serving(step_ms=300)
    write(probe, request("r"))
    read(probe)
    write(probe, cancel("r"))
    events = [read(probe), read(probe)]
    assert "token_ids" in events[0]
    assert (events[1]["finish_reason"], events[1]["completion_tokens"]) == ("cancelled", 2)


def test_a_cancel_while_paused(serving: Callable[..., subprocess.Popen[str]]) -> None:
    probe = serving()
    write(probe, {"command": "pause"}, request("r"), request("s", max_tokens=1), cancel("r"))
    assert (read(probe)["finish_reason"]) == "cancelled"
    write(probe, {"command": "resume"})
    assert [read(probe)["id"] for _ in range(2)] == ["s", "s"]


def test_a_cancelled_request_makes_room_in_the_queue(serving: Callable[..., subprocess.Popen[str]]) -> None:
    probe = serving(max_queued_requests=2)
    write(probe, {"command": "pause"})
    for i in range(20):
        write(probe, request(f"a{i}"), request(f"b{i}"), cancel(f"a{i}"), cancel(f"b{i}"))
        assert [read(probe).get("finish_reason") for _ in range(2)] == ["cancelled"] * 2
    write(probe, *(request(name) for name in "rst"))
    assert read(probe)["error"]["type"] == "queue_full"


@pytest.mark.parametrize("flags", [(), ("--tp_size=2",)])
def test_the_worker_on_one_and_two_ranks(
    run: Callable[..., subprocess.CompletedProcess[str]], llama: Path, flags: tuple[str, ...]
) -> None:
    """These lines wait in the pipe while the model loads. The cancelled requests change no other token."""
    keep = [{"id": f"k{i}", "token_ids": [5, 6, 7 + i], "max_tokens": 30, "ignore_eos": True} for i in range(3)]
    drop = [{"id": f"d{i}", "token_ids": [5, 6, 9 + i], "max_tokens": 200, "ignore_eos": True} for i in range(3)]
    common = ("--dtype=float32", *flags)
    expected = [json.loads(line) for line in run(llama, keep, *common).stdout.splitlines()]
    lines = [drop[0], *keep, drop[1], cancel("d0"), drop[2], cancel("unknown"), cancel("d2"), cancel("d1")]
    result = run(llama, [*lines, {"command": "stats"}], *common)
    assert result.returncode == 0, result.stderr
    events = [json.loads(line) for line in result.stdout.splitlines()]
    for entry in keep:
        mine = [event["token_ids"] for event in of(events, entry["id"]) if "token_ids" in event]
        assert mine == [event["token_ids"] for event in of(expected, entry["id"]) if "token_ids" in event]
        assert len(mine) == 30
    for entry in drop:
        assert usage(events, entry["id"])[0] == "cancelled"
        assert usage(events, entry["id"])[2] < 200
    assert of(events, "unknown")[0]["error"]["type"] == "not_found"
