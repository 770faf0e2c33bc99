"""Before the ready event: signals, request lines, the end of stdin, and the progress of the warm-up in a log file."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

LIMIT = 2.0  # seconds from the signal to the end of the process

# A model whose steps take a quarter of a second until the file exists. The warm-up executes 16 of them.
PLUGIN = """
import time
from pathlib import Path

from xllm_models.models.llama import LlamaForCausalLM


class FragileForCausalLM(LlamaForCausalLM):
    def forward(self, input_ids, positions):
        if not Path({fast!r}).exists():
            time.sleep(0.25)
        return super().forward(input_ids, positions)
"""
GRAPHS = ("--python_graph_backend=recorded", "--max_seqs_per_batch=4", "--max_tokens_per_batch=64")
REQUESTS = [{"id": f"r{i}", "token_ids": [5, 6, 7 + i], "max_tokens": 4, "ignore_eos": True} for i in range(3)]
CANCEL = {"command": "cancel", "id": "r1"}

Events = list[dict[str, Any]]
Run = Callable[..., subprocess.CompletedProcess[str]]


class Worker:
    """A worker whose stderr is a file, as under a supervisor."""

    def __init__(self, command: list[str], log: Path, fast: Path) -> None:
        self._log = log
        self._fast = fast
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def log(self) -> str:
        return self._log.read_text()

    def captured(self) -> list[tuple[int, int]]:
        """(number of graphs captured, number of graphs) of each line about the progress."""
        found = re.findall(r"^warm-up: (\d+) of (\d+) graphs captured", self.log(), re.MULTILINE)
        return [(int(number), int(total)) for number, total in found]

    def wait_for_warm_up(self) -> None:
        limit = time.monotonic() + 60
        while not self.captured():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < limit, self.log()
            time.sleep(0.02)

    def finish_warm_up(self) -> None:
        self._fast.touch()

    def send(self, *lines: dict[str, Any] | str) -> None:
        assert self.process.stdin is not None
        texts = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
        self.process.stdin.write("".join(texts))
        self.process.stdin.flush()

    def read(self) -> Events:
        """Closes stdin, and reads the events to the end."""
        output, _ = self.process.communicate(timeout=120)
        return [json.loads(line) for line in output.splitlines()]

    def stop(self, number: signal.Signals) -> Events:
        """Sends the signal, checks time and exit code, and returns the events that have not been read."""
        began = time.monotonic()
        self.process.send_signal(number)
        assert self.process.wait(timeout=30) == 128 + number, self.log()
        assert time.monotonic() - began < LIMIT
        assert self.process.stdout is not None
        return [json.loads(line) for line in self.process.stdout.read().splitlines()]


@pytest.fixture
def start(
    worker_path: Path, make_fragile: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []
    fast = tmp_path / "fast"
    model, plugins = make_fragile(PLUGIN.format(fast=str(fast)))

    def start_worker(*flags: str) -> Worker:
        command = [str(worker_path), f"--model={model}", f"--python_model_path={plugins}", "--device=cpu"]
        worker = Worker([*command, "--dtype=float32", *GRAPHS, *flags], tmp_path / "log", fast)
        workers.append(worker)
        return worker

    yield start_worker
    for worker in workers:
        with worker.process as process:
            process.kill()


@pytest.mark.parametrize("flags", [(), ("--tp_size=2",)])
def test_a_log_file_shows_the_progress(start: Callable[..., Worker], flags: tuple[str, ...]) -> None:
    """One rank shows it, with lines and no bar."""
    worker = start(*flags)
    worker.wait_for_warm_up()
    assert worker.captured()[0][0] < worker.captured()[0][1]
    worker.finish_warm_up()
    (ready,) = worker.read()
    assert ready["event"] == "ready"
    numbers, totals = zip(*worker.captured(), strict=True)
    assert list(numbers) == sorted(set(numbers))
    assert set(totals) == {numbers[-1]}
    assert "capturing graphs" not in worker.log()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("flags", [(), ("--tp_size=2",)])
def test_a_signal_reports_the_requests_that_wait(
    start: Callable[..., Worker], number: signal.Signals, flags: tuple[str, ...]
) -> None:
    """As later. Commands get no event, and the last line has no line feed yet."""
    worker = start(*flags)
    worker.send(*REQUESTS, CANCEL, "no JSON\n", '{"id": "part')
    worker.wait_for_warm_up()
    events = worker.stop(number)
    assert [event["id"] for event in events] == ["r0", "r1", "r2", None]
    assert [event["error"]["type"] for event in events] == ["internal"] * 3 + ["invalid_request"]
    assert {event["error"]["message"] for event in events[:3]} == {f"the worker was stopped by {number.name}"}
    assert f"stopped by {number.name}" in worker.log()


def test_a_signal_without_requests_or_after_the_end_of_stdin(start: Callable[..., Worker]) -> None:
    worker = start()
    worker.wait_for_warm_up()
    assert worker.stop(signal.SIGTERM) == []
    worker = start()
    worker.send(REQUESTS[0])
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    worker.wait_for_warm_up()
    assert [event["id"] for event in worker.stop(signal.SIGTERM)] == ["r0"]


@pytest.mark.parametrize("moment", ["load", "warm-up"])
def test_a_signal_with_many_requests_that_nobody_reads_events_of(start: Callable[..., Worker], moment: str) -> None:
    """The pipe of stdin is full, and the events would not fit into that of stdout."""
    worker = start()
    assert worker.process.stdin is not None
    os.set_blocking(worker.process.stdin.fileno(), False)
    line = json.dumps({**REQUESTS[0], "id": "r"}) + "\n"
    os.write(worker.process.stdin.fileno(), (line * 2000).encode())
    if moment == "warm-up":
        worker.wait_for_warm_up()
    else:
        time.sleep(1)
    began = time.monotonic()
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(timeout=30) == 128 + signal.SIGTERM
    assert time.monotonic() - began < LIMIT


def test_requests_that_come_early_are_served(start: Callable[..., Worker], run: Run, llama: Path) -> None:
    """Those sent during the load, and during the warm-up. Then stdin is closed."""
    worker = start()
    worker.send(REQUESTS[0])
    worker.wait_for_warm_up()
    worker.send(*REQUESTS[1:], {"command": "stats"})
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    worker.process.stdin = None
    time.sleep(0.3)
    worker.finish_warm_up()
    events = worker.read()
    assert worker.process.returncode == 0, worker.log()
    assert events[0]["event"] == "ready"
    expected = [json.loads(line) for line in run(llama, REQUESTS, "--dtype=float32").stdout.splitlines()]
    for request in REQUESTS:
        tokens, reference = (
            [event["token_ids"] for event in side if event.get("id") == request["id"] and "token_ids" in event]
            for side in (events, expected)
        )
        assert tokens == reference
        assert len(tokens) == 4
    assert [event for event in events if event.get("event") == "stats"]


def test_the_end_of_stdin_ends_the_worker_after_its_warm_up(start: Callable[..., Worker]) -> None:
    worker = start()
    worker.wait_for_warm_up()
    worker.finish_warm_up()
    (ready,) = worker.read()
    assert (ready["event"], worker.process.returncode) == ("ready", 0)
