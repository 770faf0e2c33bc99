"""Input that no client should send: each bad line gets one error event, and requests in flight get all their tokens."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SETTINGS = {
    "num_blocks": 64,
    "block_size": 4,
    "max_model_len": 40,
    "max_seqs": 4,
    "max_tokens": 16,
    "vocab_size": 100,
    "step_ms": 1,
}
MAX_LINE_BYTES = 4096 + 16 * (40 + 1024)
TOO_LONG = f"the line has more than {MAX_LINE_BYTES} bytes, the limit for a max_model_len of 40"
TOO_DEEP = "the line is not valid JSON: it is nested more than 16 levels deep"
BEFORE = {"id": "before", "token_ids": [1, 2, 3], "max_tokens": 20}
AFTER = {"id": "after", "token_ids": [4, 5, 6], "max_tokens": 20}

Event = dict[str, Any]
Send = Callable[..., list[Event]]


@pytest.fixture(scope="session")
def send(probe_path: Path) -> Send:
    """`send(*lines, **settings)`: the error events of these lines, sent between two requests that must be answered."""

    def check(*lines: bytes, **changes: Any) -> list[Event]:
        stdin = b"\n".join([json.dumps(BEFORE).encode(), *lines, json.dumps(AFTER).encode()]) + b"\n"
        command = [probe_path, "serve", json.dumps({**SETTINGS, **changes})]
        result = subprocess.run(command, input=stdin, capture_output=True, timeout=60, check=False)
        assert result.returncode == 0, result.stderr
        events = [json.loads(line) for line in result.stdout.decode().splitlines()]
        for name in ("before", "after"):
            mine = [event for event in events if event.get("id") == name]
            assert sum(len(event.get("token_ids", [])) for event in mine) == 20
            assert mine[-1]["finished"]
        return [event for event in events if "error" in event]

    return check


def messages(errors: list[Event]) -> list[str]:
    assert {error["error"]["type"] for error in errors} <= {"invalid_request"}
    return [error["error"]["message"] for error in errors]


REQUEST = {
    "id": "bad",
    "token_ids": [1],
    "max_tokens": 1,
    "stop_token_ids": [2],
    "ignore_eos": True,
    "show_logits": True,
}
COMMANDS = tuple({"command": name} for name in ("stats", "pause", "resume", "cancel", "unknown"))
MESSAGES = (REQUEST, *COMMANDS)
KEYS = sorted({*REQUEST, "command", "unknown"})


def with_raw(message: Event, key: str, raw: bytes) -> bytes:
    """The message as JSON, with `raw` as the value of `key`."""
    return json.dumps({**message, key: "@"}).encode().replace(b'"@"', raw)


NESTED = {
    "arrays": lambda depth: b"[" * depth + b"]" * depth,
    "objects": lambda depth: b'{"a":' * depth + b"1" + b"}" * depth,
    "open arrays": lambda depth: b"[" * depth,
    "open objects": lambda depth: b'{"a":' * depth,
    "mixed": lambda depth: b'[{"a":' * (depth // 2) + b"1" + b"}]" * (depth // 2),
}


@pytest.mark.parametrize("form", NESTED)
def test_nested_values_of_every_key(send: Send, form: str) -> None:
    values = [NESTED[form](depth) for depth in (16, 1600)]
    lines = [with_raw(message, key, raw) for message in MESSAGES for key in KEYS for raw in values]
    assert messages(send(*lines)) == [TOO_DEEP] * len(lines)
    # The report's sizes, for a model with a long context.
    deep = [with_raw(REQUEST, key, NESTED[form](50_000)) for key in ("id", "token_ids", "unknown")]
    assert messages(send(*deep, NESTED[form](50_000), max_model_len=100_000)) == [TOO_DEEP] * 4


def test_nesting_within_the_limit_is_refused_by_key(send: Send) -> None:
    depth = 15
    assert messages(send(with_raw(REQUEST, "id", NESTED["arrays"](depth)))) == [
        f"id is {'[' * depth}{']' * depth}; expected a string of 1 to 256 bytes"
    ]


def test_long_lines(send: Send) -> None:
    longest = json.dumps(REQUEST).encode().ljust(MAX_LINE_BYTES)
    assert messages(send(longest)) == []
    for line in (longest + b" ", b"x" * 10 * MAX_LINE_BYTES, b" " * 300_000, b'{"id": "' + b"a" * 300_000):
        (error,) = send(line)
        assert (error["id"], error["line"], error["error"]["message"]) == (None, 2, TOO_LONG)
    errors = send(b"x" * 100_000, b"{", b"y" * 100_000, b"z" * 70_000)
    assert [error["line"] for error in errors] == [2, 3, 4, 5]


def test_the_longest_request_has_room(send: Send) -> None:
    """With large ids, spaces, an escaped request id and all stop tokens."""
    limits = {"vocab_size": 2**31 - 1, "max_model_len": 2000, "num_blocks": 1000}
    tokens = [2**31 - 2] * 1024
    request = {"id": "\x01" * 256, "token_ids": [2**31 - 2] * 1999, "max_tokens": 1, "stop_token_ids": tokens}
    assert send(json.dumps(request, separators=(" , ", " : ")).encode(), **limits) == []


def test_a_line_without_an_end_takes_no_memory(probe_path: Path) -> None:
    command = [str(probe_path), "serve", json.dumps(SETTINGS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as probe:
        assert probe.stdin is not None
        assert probe.stdout is not None
        probe.stdin.write(json.dumps(BEFORE).encode() + b"\n")
        for _ in range(64):
            probe.stdin.write(b"[" * (1 << 20))
        probe.stdin.flush()
        events = []
        while not any(event.get("finished") for event in events) or not any("error" in event for event in events):
            events.append(json.loads(probe.stdout.readline()))
        assert [event["error"]["message"] for event in events if "error" in event] == [TOO_LONG]
        status = Path(f"/proc/{probe.pid}/status").read_text()
        peak = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert peak is not None
        assert int(peak[1]) < 32 << 10
        probe.stdin.write(b"\n" + json.dumps(AFTER).encode() + b"\n")
        probe.stdin.close()
        events = [json.loads(line) for line in probe.stdout]
    assert probe.returncode == 0
    assert events[-1] == {**events[-1], "id": "after", "finished": True}


def test_the_input_ends_within_a_long_line(probe_path: Path) -> None:
    stdin = json.dumps(BEFORE).encode() + b"\n" + b"[" * 1_000_000
    command = [probe_path, "serve", json.dumps(SETTINGS)]
    result = subprocess.run(command, input=stdin, capture_output=True, timeout=60, check=True)
    events = [json.loads(line) for line in result.stdout.decode().splitlines()]
    assert [event["line"] for event in events if "error" in event] == [2]
    assert events[-1]["finished"]


GOOD = json.dumps({"id": "odd", "token_ids": [1], "max_tokens": 1}).encode()

ODD_LINES: list[tuple[bytes, str]] = [
    (GOOD + b"\0", r"NUL byte at offset 48"),
    (GOOD + b"\0" + GOOD, r"NUL byte at offset 48"),
    (b"\0" + GOOD, r"NUL byte at offset 0"),
    (b"\0", r"NUL byte at offset 0"),
    (GOOD.replace(b"odd", b"o\0d"), r"NUL byte at offset 9"),
    (GOOD.replace(b"odd", b"o\xffd"), "invalid string: ill-formed UTF-8 byte"),
    (GOOD.replace(b"odd", b"\xed\xa0\x80"), "invalid string: ill-formed UTF-8 byte"),
    (GOOD.replace(b"odd", b"\xc0\xaf"), "invalid string: ill-formed UTF-8 byte"),
    (GOOD.replace(b"odd", rb"\ud800"), r"surrogate U\+D800\.\.U\+DBFF must be followed by"),
    (GOOD.replace(b"odd", rb"\udc00"), r"surrogate U\+DC00\.\.U\+DFFF must follow"),
    (GOOD.replace(b"odd", rb"\ud800\ud800"), r"surrogate U\+D800\.\.U\+DBFF must be followed by"),
    (GOOD.replace(b"odd", b"o\td"), "invalid string: control character"),
    (GOOD.replace(b'"token_ids"', b'"id"'), 'key "id" appears twice'),
    (GOOD.replace(b"[1]", b'{"a": 1, "a": 2}'), 'key "a" appears twice'),
    (b'{"%s": 1, "%s": 2}' % (b"k" * 5000, b"k" * 5000), r'key "k{80}\.\.\." appears twice'),
    (b'{"%s": 1}' % (b"k" * 10000), r'unknown key "k{79}\.\.\.; allowed'),
    (GOOD.replace(b"odd", b"a" * 257), r'id is "a{79}\.\.\.; expected a string of 1 to 256 bytes'),
    (GOOD.replace(b"odd", "ä".encode() * 129), r'id is ".*\.\.\.; expected a string of 1 to 256 bytes'),
    (b'"%s' % (b"s" * 10000), "parse error .{1,300}$"),
    (GOOD.replace(b"[1]", b"[1e400]"), "number overflow"),
    (GOOD.replace(b"[1]", b"[" + b"9" * 5000 + b"]"), "number overflow"),
    (GOOD.replace(b"[1]", b"[" + b"9" * 300 + b"]"), r"token_ids\[0\] is .*; expected"),
    (GOOD.replace(b"[1]", b"[0." + b"1" * 5000 + b"]"), r"token_ids\[0\] is .*; expected"),
    (GOOD.replace(b"[1]", b"[1e0]"), r"token_ids\[0\] is 1\.0; expected"),
    (GOOD.replace(b"[1]", b"[NaN]"), "invalid literal"),
    (GOOD.replace(b"[1]", b"[0x10]"), "parse error"),
    (GOOD.replace(b'"max_tokens": 1', b'"max_tokens": 9223372036854775808'), "max_tokens is 9223372036854775808"),
    (GOOD.replace(b"[1]", b"[1],"), "parse error"),
    (GOOD + GOOD, "parse error"),
    (GOOD.replace(b": 1}", b': 1, "stop_token_ids": [' + b"1," * 1024 + b"1]}"), "stop_token_ids has 1025 tokens; the"),
    (b'{"command": "%s"}' % (b"c" * 10000), r'command is "c{79}\.\.\.; expected'),
    (b'{"command": [[[[1]]]]}', r"command is \[\[\[\[1\]\]\]\]; expected"),
]


@pytest.mark.parametrize(("line", "pattern"), ODD_LINES)
def test_odd_lines(send: Send, line: bytes, pattern: str) -> None:
    (message,) = messages(send(line))
    assert re.search(pattern, message), message
    assert len(message.encode()) < 500


@pytest.mark.parametrize(
    "line",
    [
        GOOD + b"\r",
        b" \t" + GOOD + b" \t\r",
        b"\xef\xbb\xbf" + GOOD,
        GOOD.replace(b"odd", rb"\u0000"),
        GOOD.replace(b"odd", rb"\ud83d\ude00"),
        GOOD.replace(b"odd", b"a" * 256),
        GOOD.replace(b'"max_tokens": 1', b'"max_tokens": 9223372036854775807, "stop_token_ids": [0, 99]'),
    ],
)
def test_odd_lines_that_are_requests(send: Send, line: bytes) -> None:
    assert send(line) == []


def test_blank_lines(send: Send) -> None:
    (error,) = send(b"", b"\r", b" \t\r", b"", b"no JSON", b"\r")
    assert error["line"] == 6


@pytest.mark.parametrize("paused", [False, True])
def test_the_queue_is_bounded(probe_path: Path, paused: bool) -> None:
    """Two requests run and three wait; the others are refused by id. Commands and bad lines still get through."""
    limits = {**SETTINGS, "max_seqs": 2, "max_queued_requests": 3, "step_ms": 30}
    requests = [{"id": f"r{i}", "token_ids": [1], "max_tokens": 8} for i in range(9)]
    with subprocess.Popen(
        [str(probe_path), "serve", json.dumps(limits)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as probe:
        assert probe.stdin is not None
        assert probe.stdout is not None

        def write(*lines: Event) -> None:
            assert probe.stdin is not None
            probe.stdin.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
            probe.stdin.flush()

        events: list[Event] = []
        if paused:
            write({"command": "pause"}, *requests, {"command": "stats"}, {"command": "resume"})
        else:
            write(*requests[:2])
            while {event["id"] for event in events} != {"r0", "r1"}:
                events.append(json.loads(probe.stdout.readline()))
            write(*requests[2:], {"command": "stats"})
        probe.stdin.close()
        events += [json.loads(line) for line in probe.stdout]
    assert probe.returncode == 0
    num_served = 3 if paused else 5
    refused = [event for event in events if "error" in event]
    assert [event["id"] for event in refused] == [request["id"] for request in requests[num_served:]]
    assert {event["error"]["type"] for event in refused} == {"queue_full"}
    assert {event["error"]["message"] for event in refused} == {
        "the queue is full: 3 requests wait already, the limit of --max_queued_requests"
    }
    finished = [event["id"] for event in events if event.get("finished")]
    assert sorted(finished) == [request["id"] for request in requests[:num_served]]
    assert [event for event in events if event.get("event") == "stats"]


def test_lines_that_wait_for_the_engine_are_bounded(probe_path: Path) -> None:
    """The probe reads no further while a long step runs and many lines wait. Each line is answered in the end."""
    limits = {**SETTINGS, "max_queued_requests": 3, "step_ms": 300}
    request = {"id": "r", "token_ids": [1], "max_tokens": 2}
    lines = json.dumps(request).encode() + b"\n" + b"x\n" * 30_000
    command = [probe_path, "serve", json.dumps(limits)]
    result = subprocess.run(command, input=lines, capture_output=True, timeout=60, check=True)
    events = [json.loads(line) for line in result.stdout.decode().splitlines()]
    assert sum("error" in event for event in events) == 30_000
    assert events[-1].get("finished") or any(event.get("finished") for event in events)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=300),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(), children),
    max_leaves=20,
)
OBJECTS = st.dictionaries(st.sampled_from(KEYS), JSON_VALUES).map(lambda value: json.dumps(value).encode())
TOKENS = [b'{"id":"bad",', b'"token_ids":', b'"command":', b'"pause"', b'"resume"', b"[1,", b"1]", b"}", b'"', b"-"]
ODD = [
    b"\\u",
    b"\\ud800",
    b"\0",
    b"\xff",
    b"\xe4",
    b"\r",
    b"1e999",
    b"9" * 400,
    b"[" * 1000,
    b'{"a":' * 900,
    b"x" * 30_000,
]
PIECES = st.sampled_from([*TOKENS, *ODD])
BROKEN = st.lists(PIECES | st.binary(max_size=20), max_size=12).map(b"".join)


@settings(deadline=None, max_examples=150)
@given(lines=st.lists(OBJECTS | BROKEN, max_size=20))
def test_any_lines(send: Send, lines: list[bytes]) -> None:
    lines = [line.replace(b"\n", b"") for line in lines]
    errors = send(*lines)
    assert len(errors) <= sum(bool(line.strip()) for line in lines)
    for error in errors:
        assert error["error"]["type"] in ("invalid_request", "queue_full")
        assert len(error["error"]["message"].encode()) < 500


@settings(deadline=None, max_examples=60)
@given(data=st.binary(max_size=400), cut=st.integers(0, 48))
def test_any_bytes_within_a_request(send: Send, data: bytes, cut: int) -> None:
    line = GOOD[:cut] + data.replace(b"\n", b" ") + GOOD[cut:]
    assert len(send(line)) <= 1
