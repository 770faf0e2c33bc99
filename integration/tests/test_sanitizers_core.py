"""The worker's core under sanitizers: cancels, scheduling, bad input, signals, and descriptors that are closed or full.

What the answers must be is in the tests of each part; here they are counted only.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from cmake_projects import build_project
from recall_cases import case_of
from sanitizers import ADDRESS_FLAGS, THREAD_FLAGS, TSAN_OPTIONS, without_randomized_addresses

SOURCE = Path(__file__).parents[1] / "worker"
SANITIZERS = {"address,undefined": ADDRESS_FLAGS, "thread": THREAD_FLAGS}
SETTINGS = {
    "num_blocks": 64,
    "block_size": 4,
    "max_model_len": 120,
    "max_seqs": 4,
    "max_tokens": 16,
    "max_mixed_prefill_tokens": 8,
    "vocab_size": 100,
    "enable_prefix_cache": True,
}
Event = dict[str, Any]


def request(i: int, num_tokens: int = 2, max_tokens: int = 20) -> Event:
    return {"id": f"r{i}", "token_ids": [(i + j) % 50 for j in range(num_tokens)], "max_tokens": max_tokens}


def cancel(i: int) -> Event:
    return {"command": "cancel", "id": f"r{i}"}


def as_lines(*events: Event) -> bytes:
    return "".join(json.dumps(event) + "\n" for event in events).encode()


REQUESTS = [request(i, 2 + 23 * (i % 5 == 0)) for i in range(40)]
STATS = {"command": "stats"}
LINES = as_lines(*REQUESTS, *(cancel(i) for i in (0, 3, 4, 20, 39, 99)), STATS)


class Probe:
    """The core probe, built with sanitizers. They report to files, since some tests close stderr."""

    def __init__(self, program: Path, logs: Path) -> None:
        self._command = [*without_randomized_addresses(), str(program)]
        self._logs = logs
        options = f"log_path={logs / 'report'}"
        self._environment = {
            **os.environ,
            "ASAN_OPTIONS": options,
            "UBSAN_OPTIONS": f"{options}:print_stacktrace=1",
            # A process whose step is stuck ends with _exit(), which joins no thread.
            "TSAN_OPTIONS": f"{TSAN_OPTIONS}:{options}:report_thread_leaks=0",
        }

    def command(self, **changes: Any) -> list[str]:
        """Serves with these settings."""
        return [*self._command, "serve", json.dumps({**SETTINGS, **changes})]

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(command, env=self._environment, **{**pipes, **options})

    def finish(self, process: subprocess.Popen[bytes], stdin: bytes = b"", code: int = 0) -> bytes:
        """Sends the input, waits for the end, checks the exit code, and that there is no report. Returns stdout."""
        with process:
            try:
                output, stderr = process.communicate(stdin, timeout=60)
            finally:
                process.kill()
        reports = [path.read_text() for path in self._logs.iterdir()]
        assert not reports, reports[0]
        assert process.returncode == code, stderr
        return output or b""

    def serve(self, stdin: bytes, **changes: Any) -> list[Event]:
        output = self.finish(self.start(self.command(**changes)), stdin)
        return [json.loads(line) for line in output.decode().splitlines()]

    def schedule(self, *cases: Event) -> list[Event]:
        output = self.finish(self.start([*self._command, "schedule"]), as_lines(*cases))
        return [json.loads(line) for line in output.splitlines()]


@pytest.fixture(scope="module", params=SANITIZERS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("core")
    build_project(SOURCE, folder, "xllm_core_probe", flags=SANITIZERS[request.param], build_type="None")
    return folder / "xllm_core_probe"


@pytest.fixture
def probe(program: Path, tmp_path: Path) -> Probe:
    logs = tmp_path / "logs"
    logs.mkdir()
    return Probe(program, logs)


CHANGES: list[dict[str, Any]] = [
    {},
    {"step_ms": 1, "num_blocks": 30},
    {"nan_on": 13},
    {"fail_on": 13},
    {"max_queued_requests": 3},
]


@pytest.mark.parametrize("changes", CHANGES)
def test_cancels_of_the_reader_while_the_engine_works(probe: Probe, changes: dict[str, Any]) -> None:
    """Some requests wait, share pages, are preempted, fail, or are refused."""
    events = probe.serve(LINES, **changes)
    assert sum(event.get("event") == "stats" for event in events) == 1
    ends = [event["id"] for event in events if event.get("finished") or "error" in event]
    assert {entry["id"] for entry in REQUESTS} <= set(ends)


def test_scheduled_prompts(probe: Probe) -> None:
    """Long prompts next to short ones, too few pages, and requests that are cancelled in each state."""
    long = [(0, request(0, 100)), (0, request(1, 100))]
    short = [(i // 3, request(i, 3 + i % 7, 30)) for i in range(2, 30)]
    cancels = [(4 * i, cancel(3 * i)) for i in range(10)]
    lines = sorted((*long, *short, *cancels), key=lambda line: line[0])
    changes: list[dict[str, Any]] = [{}, {"num_blocks": 31}, {"max_seqs": 2}, {"nan_on": 13}, {"fail_on": 13}]
    results = probe.schedule(*(case_of(lines, **{**SETTINGS, **change}) for change in changes))
    assert len(results) == len(changes)
    for result, change in zip(results, changes, strict=True):
        stats = result["events"][-1]["scheduler"]
        assert stats["num_cancelled"] > 0
        assert stats["num_free_blocks"] == change.get("num_blocks", SETTINGS["num_blocks"])


BAD_LINES = [
    b"x" * 1_000_000,
    b"[" * 100_000,
    b'{"a":' * 3000,
    b"\0" * 300,
    as_lines(request(1))[:-1] + b"\0",
    b"\xff\xfe\xc3(" * 50,
    b'"\\ud800',
    b"1e999",
    b"9" * 5000,
    b'{"command": "cancel"}',
    b'{"command": "%s"}' % (b"c" * 10_000),
    b'{"id": "%s", "token_ids": [1], "max_tokens": 1}' % (b"i" * 257),
    b'{"id": "many", "token_ids": [%s1], "max_tokens": 1}' % (b"1," * 3000),
    b'{"id": "large", "token_ids": [100], "max_tokens": 9223372036854775808}',
    b'{"id": "stops", "token_ids": [1], "max_tokens": 1, "stop_token_ids": [%s1]}' % (b"1," * 1024),
]


def test_long_and_bad_lines_between_requests(probe: Probe) -> None:
    """The last line, which is too long, has no line feed."""
    chooser = random.Random(0)
    noise = [
        bytes(chooser.choices(b'{}[]":,\\u0123456789aeilnrtu\0\xff ', k=chooser.randrange(80))) for _ in range(300)
    ]
    lines = [*BAD_LINES, *(b"!" + line for line in noise)]
    chooser.shuffle(lines)
    half = len(lines) // 2
    stdin = b"\n".join(
        [*as_lines(*REQUESTS[:20]).splitlines(), *lines[:half], *as_lines(*REQUESTS[20:]).splitlines(), *lines[half:]]
    )
    events = probe.serve(stdin + b"\n" + BAD_LINES[0])
    assert sum("error" in event for event in events) == len(lines) + 1
    assert sum(bool(event.get("finished")) for event in events) == len(REQUESTS)


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_descriptors(probe: Probe, closed: tuple[int, ...]) -> None:
    redirections = " ".join({0: "<&-", 1: ">&-", 2: "2>&-"}[number] for number in closed)
    process = probe.start(["sh", "-c", f'exec "$@" {redirections}', "sh", *probe.command()])
    output = probe.finish(process, b"" if 0 in closed else LINES, code=int(1 in closed))
    assert output.count(b'"finished":true') == (len(REQUESTS) if closed == (2,) else 0)


def test_descriptors_that_do_not_block(probe: Probe) -> None:
    """The probe finds no input, and no room for its output, again and again."""
    (their_input, our_input), (our_output, their_output) = os.pipe(), os.pipe()
    os.set_blocking(their_input, False)
    os.set_blocking(their_output, False)
    process = probe.start(probe.command(), stdin=their_input, stdout=their_output)
    os.close(their_input)
    os.close(their_output)
    lines = as_lines(*(request(i, 2, 60) for i in range(200)))
    for begin in range(0, len(lines), 1500):
        os.write(our_input, lines[begin : begin + 1500])
        time.sleep(0.005)
    os.close(our_input)
    output = b""
    while piece := os.read(our_output, 10_000):
        output += piece
        time.sleep(0.001)
    os.close(our_output)
    probe.finish(process)
    assert output.count(b'"finished":true') == 200


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_while_steps_run(probe: Probe, number: signal.Signals) -> None:
    for delay in (0.0, 0.05):
        process = probe.start(probe.command(step_ms=5))
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(LINES * 3)
        process.stdin.flush()
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(number)
        output = probe.finish(process, code=128 + number)
        assert b"the worker was stopped by" in output


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_signal_while_nobody_reads(probe: Probe, name: str, blocking: bool) -> None:
    """The events of the requests fill stdout, or the logs of 250 failed steps fill stderr."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(write, blocking)
    process = probe.start(probe.command(fail_on=60), **{name: write})
    os.close(write)
    assert process.stdin is not None
    process.stdin.write(as_lines(*({**request(i), "token_ids": [60]} for i in range(1000))) + LINES)
    process.stdin.flush()
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    probe.finish(process, code=128 + signal.SIGTERM)
    os.close(read)


def test_a_signal_while_a_step_does_not_end(probe: Probe) -> None:
    """The signal's thread reports the requests of the engine, which is in its step."""
    process = probe.start(probe.command(step_ms=8000))
    assert process.stdin is not None
    process.stdin.write(LINES)
    process.stdin.flush()
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    output = probe.finish(process, code=128 + signal.SIGTERM)
    assert output.count(b"the worker was stopped by SIGTERM") == len(REQUESTS)
