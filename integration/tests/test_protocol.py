"""JSON Lines: a malformed line fails without affecting others, with a message that names field, value and limit."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recall_cases import without_timing

Ask = Callable[[str, Any], Any]
RunProbe = Callable[..., subprocess.CompletedProcess[str]]
Line = str | dict[str, Any]

SETTINGS = {
    "num_blocks": 8,
    "block_size": 4,
    "max_model_len": 40,
    "max_seqs": 4,
    "max_tokens": 16,
    "vocab_size": 100,
}
GOOD = {"id": "good", "token_ids": [1, 2, 3], "max_tokens": 2}


def serve(run_probe: RunProbe, *lines: Line, **changes: Any) -> list[dict[str, Any]]:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    result = run_probe("serve", json.dumps({**SETTINGS, **changes}), stdin=text)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def request(**changes: Any) -> dict[str, Any]:
    return {"id": "bad", "token_ids": [1, 2, 3], "max_tokens": 2, **changes}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in request().items() if name != key}


IDS = "token ids from 0 to 99"
IN_VOCABULARY = f"expected {IDS} (the vocabulary has 100)"

BAD_LINES: list[tuple[Line, str | None, str]] = [
    ("[1, 2]", None, "the line is an array; expected an object"),
    ("7", None, "the line is an integer; expected an object"),
    ('{"id": "bad", "id": "worse"}', None, 'the line is not valid JSON: key "id" appears twice'),
    (without("id"), None, 'key "id" is missing'),
    (without("token_ids"), "bad", 'key "token_ids" is missing'),
    (without("max_tokens"), "bad", 'key "max_tokens" is missing'),
    (
        request(temperature=0.5),
        "bad",
        'unknown key "temperature"; allowed: id, token_ids, max_tokens, stop_token_ids, ignore_eos, show_logits',
    ),
    (request(id=7), None, "id is 7; expected a string of 1 to 256 bytes"),
    (request(id=""), None, 'id is ""; expected a string of 1 to 256 bytes'),
    (request(token_ids="abc"), "bad", f'token_ids is "abc"; expected an array of {IDS}'),
    (request(token_ids=[1, "2"]), "bad", f'token_ids[1] is "2"; {IN_VOCABULARY}'),
    (request(token_ids=[1, 2.0]), "bad", f"token_ids[1] is 2.0; {IN_VOCABULARY}"),
    (request(token_ids=[1, True]), "bad", f"token_ids[1] is true; {IN_VOCABULARY}"),
    (request(token_ids=[100]), "bad", f"token_ids[0] is 100; {IN_VOCABULARY}"),
    (request(token_ids=[1, 2, -1]), "bad", f"token_ids[2] is -1; {IN_VOCABULARY}"),
    (request(token_ids=[2**63]), "bad", f"token_ids[0] is {2**63}; {IN_VOCABULARY}"),
    (request(token_ids=[]), "bad", "token_ids is empty; expected at least 1 token"),
    (request(max_tokens=0), "bad", "max_tokens is 0; expected an integer of at least 1"),
    (request(max_tokens=-5), "bad", "max_tokens is -5; expected an integer of at least 1"),
    (request(max_tokens="5"), "bad", 'max_tokens is "5"; expected an integer of at least 1'),
    (request(max_tokens=1.5), "bad", "max_tokens is 1.5; expected an integer of at least 1"),
    (request(max_tokens=None), "bad", "max_tokens is null; expected an integer of at least 1"),
    (request(stop_token_ids=[100]), "bad", f"stop_token_ids[0] is 100; {IN_VOCABULARY}"),
    (request(stop_token_ids=3), "bad", f"stop_token_ids is 3; expected an array of {IDS}"),
    (request(ignore_eos=1), "bad", "ignore_eos is 1; expected true or false"),
    (
        request(token_ids=[1] * 40),
        "bad",
        "token_ids has 40 tokens; the limit is 39, so that an answer of one token fits into the context of 40",
    ),
    (
        request(token_ids=[1] * 33),
        "bad",
        "token_ids has 33 tokens; the limit is 32, the size of the whole KV cache",
    ),
    ({"command": "stop"}, None, 'command is "stop"; expected "stats", "pause", "resume" or "cancel"'),
    ({"command": "stats", "id": "bad"}, "bad", 'unknown key "id"; allowed: command'),
]


@pytest.mark.parametrize(("line", "request_id", "message"), BAD_LINES)
def test_a_malformed_line_fails_alone(run_probe: RunProbe, line: Line, request_id: str | None, message: str) -> None:
    expected = serve(run_probe, {**GOOD, "id": "before"}, {**GOOD, "id": "after"})
    events = serve(run_probe, {**GOOD, "id": "before"}, line, {**GOOD, "id": "after"})
    error = {"id": request_id, "line": 2, "error": {"type": "invalid_request", "message": message}}
    assert [event for event in events if "error" in event] == [error]
    for name in ("before", "after"):
        mine = [without_timing(event) for event in events if event.get("id") == name]
        assert mine == [without_timing(event) for event in expected if event["id"] == name]
        assert mine[-1]["completion_tokens"] == 2


def test_a_line_that_is_not_json(run_probe: RunProbe) -> None:
    events = serve(run_probe, '{"id": "bad", "token_ids": [1,', GOOD)
    errors = [event for event in events if "error" in event]
    assert len(errors) == 1
    assert (errors[0]["id"], errors[0]["line"]) == (None, 1)
    assert errors[0]["error"]["message"].startswith("the line is not valid JSON: parse error at line 1")
    assert events[-1]["finished"]


def test_invalid_utf8(probe_path: Path) -> None:
    lines = b'\xff\xfe{"id"\n{"id": "\xff", "max_tokens": 1}\n' + json.dumps(GOOD).encode()
    result = subprocess.run(
        [probe_path, "serve", json.dumps(SETTINGS)], input=lines, capture_output=True, timeout=60, check=True
    )
    events = [json.loads(line) for line in result.stdout.decode().splitlines()]
    assert [event["line"] for event in events if "error" in event] == [1, 2]
    assert events[-1]["finished"]


def test_an_id_in_use_is_refused(run_probe: RunProbe) -> None:
    slow = {**GOOD, "max_tokens": 20}
    events = serve(run_probe, slow, GOOD, step_ms=5)
    message = 'id "good" belongs to a request that is not finished'
    assert [event for event in events if "error" in event] == [
        {"id": "good", "line": 2, "error": {"type": "invalid_request", "message": message}}
    ]
    assert events[-1]["completion_tokens"] == 20


@pytest.mark.parametrize("end", ["answer", "failure"])
def test_the_id_of_a_finished_request_may_be_used_again(ask: Ask, end: str) -> None:
    first = GOOD if end == "answer" else {**GOOD, "token_ids": [13]}
    requests = [{"arrival": 0, "line": json.dumps(first)}, {"arrival": 9, "line": json.dumps(GOOD)}]
    events = ask("schedule", {**SETTINGS, "fail_on": 13, "requests": requests})["events"]
    assert [event["line"] for event in events if "error" in event] == ([] if end == "answer" else [1])
    assert without_timing(events[-2]) == {
        "id": "good",
        "finished": True,
        "finish_reason": "length",
        "prompt_tokens": 3,
        "completion_tokens": 2,
    }


def test_blank_lines_are_skipped_and_counted(run_probe: RunProbe) -> None:
    events = serve(run_probe, "", "  \t", "nonsense", "\r", GOOD)
    assert [event["line"] for event in events if "error" in event] == [3]
    assert events[-1]["finished"]


def test_no_request_at_all(run_probe: RunProbe) -> None:
    assert serve(run_probe, "") == []


def test_requests_in_flight_at_the_end_of_input_are_finished(run_probe: RunProbe) -> None:
    requests = [{"id": str(i), "token_ids": [i + 1], "max_tokens": 10} for i in range(20)]
    events = serve(run_probe, *requests, step_ms=1)
    finished = {event["id"]: event for event in events if event.get("finished")}
    assert len(finished) == 20
    assert {event["completion_tokens"] for event in finished.values()} == {10}


def test_output_of_libraries_stays_out_of_the_events(run_probe: RunProbe) -> None:
    result = run_probe("serve", json.dumps(SETTINGS), stdin=json.dumps(GOOD))
    assert result.returncode == 0
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == ["good"] * 3
    assert "a library prints to stdout" in result.stderr


def test_stats_while_requests_run(run_probe: RunProbe) -> None:
    events = serve(run_probe, {**GOOD, "max_tokens": 20}, {"command": "stats"}, step_ms=5)
    stats = next(event for event in events if event.get("event") == "stats")
    assert stats["executor"] == {}
    assert stats["scheduler"]["num_blocks"] == 8
    assert stats["scheduler"]["num_running"] + stats["scheduler"]["num_waiting"] == 1


def test_a_closed_stdout_ends_the_worker(probe_path: Path) -> None:
    process = subprocess.Popen(
        [probe_path, "serve", json.dumps({**SETTINGS, "step_ms": 5})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.close()
    process.stdin.write(json.dumps({**GOOD, "max_tokens": 20}).encode() + b"\n")
    process.stdin.flush()  # and stdin stays open: the worker must not wait for it
    assert process.wait(timeout=20) == 1
    assert process.stderr is not None
    assert b"stdout: Broken pipe" in process.stderr.read()
    process.stdin.close()
    process.stderr.close()


def test_no_step_runs_between_pause_and_resume(run_probe: RunProbe) -> None:
    lines: list[Line] = [{"command": "pause"}, GOOD, {"command": "stats"}, {"command": "resume"}]
    events = serve(run_probe, *lines, step_ms=5)
    assert [event.get("event", "") for event in events] == ["stats", "", "", ""]
    assert events[0]["scheduler"]["num_waiting"] == 1
    assert events[-1]["finished"]


def test_the_end_of_the_input_resumes(run_probe: RunProbe) -> None:
    assert serve(run_probe, {"command": "pause"}, GOOD)[-1]["finished"]


def test_show_logits_is_a_flag(run_probe: RunProbe) -> None:
    (event,) = serve(run_probe, request(show_logits=1))
    assert event["error"]["message"] == "show_logits is 1; expected true or false"
