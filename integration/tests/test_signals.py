"""SIGINT, SIGTERM and SIGHUP: the worker ends within two seconds and reports every unfinished request."""

from __future__ import annotations

import array
import fcntl
import json
import os
import resource
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

LIMIT = 2.0  # seconds from the signal to the end of the process

# A model whose step takes 8 seconds when it contains token 29.
PLUGIN = """
import time

from xllm_models.models.llama import LlamaForCausalLM


class FragileForCausalLM(LlamaForCausalLM):
    def forward(self, input_ids, positions):
        if 29 in set(input_ids.tolist()):
            time.sleep(8)
        return super().forward(input_ids, positions)
"""
LONG = {"id": "long", "token_ids": [5, 29], "max_tokens": 8}

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(worker_path: Path, llama: Path) -> Iterator[Start]:
    """`start(*flags, model=...)`: starts a worker with pipes. Kills it at the end of the test if it still runs."""
    workers: list[subprocess.Popen[str]] = []

    def start_worker(*flags: str, model: Path = llama, hangup: Any = signal.SIG_DFL) -> subprocess.Popen[str]:
        worker = subprocess.Popen(
            [str(worker_path), f"--model={model}", "--device=cpu", "--dtype=float32", *flags],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: signal.signal(signal.SIGHUP, hangup),  # the tests may run under nohup
        )  # fmt: skip
        workers.append(worker)
        return worker

    yield start_worker
    for worker in workers:
        worker.kill()
        worker.communicate()


@pytest.fixture
def start_slow(start: Start, make_fragile: Callable[[str], tuple[Path, Path]]) -> Start:
    """As `start`, with the slow model above."""
    model, plugins = make_fragile(PLUGIN)
    return lambda: start(f"--python_model_path={plugins}", model=model)


def send(worker: subprocess.Popen[str], *requests: dict[str, Any]) -> None:
    assert worker.stdin is not None
    worker.stdin.write("".join(json.dumps(request) + "\n" for request in requests))
    worker.stdin.flush()


def read_until(worker: subprocess.Popen[str], condition: Callable[[dict[str, Any]], bool]) -> None:
    assert worker.stdout is not None
    for line in worker.stdout:
        if condition(json.loads(line)):
            return
    raise AssertionError(f"the worker ended early: {worker.stderr.read() if worker.stderr else ''}")


def stop(worker: subprocess.Popen[str], number: signal.Signals) -> list[dict[str, Any]]:
    """Sends the signal, checks exit code and time, and returns the events that followed."""
    began = time.monotonic()
    worker.send_signal(number)
    assert worker.wait(timeout=30) == 128 + number, worker.stderr.read() if worker.stderr else ""
    assert time.monotonic() - began < LIMIT
    assert worker.stdout is not None
    return [json.loads(line) for line in worker.stdout.read().splitlines()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_requests_in_flight_are_reported_three_times(start: Start, number: signal.Signals) -> None:
    for _ in range(3):
        worker = start("--max_seqs_per_batch=2")
        read_until(worker, lambda event: event.get("event") == "ready")
        send(
            worker, *({"id": f"r{i}", "token_ids": [5, 6, 7], "max_tokens": 200, "ignore_eos": True} for i in range(4))
        )
        read_until(worker, lambda event: event.get("id") == "r1")
        events = stop(worker, number)
        errors = {event["id"]: event["error"] for event in events if "error" in event}
        assert set(errors) == {"r0", "r1", "r2", "r3"}
        assert {error["message"] for error in errors.values()} == {f"the worker was stopped by {number.name}"}
        assert {error["type"] for error in errors.values()} == {"internal"}
        assert all("error" in event for event in events[-4:])


def test_an_idle_worker_ends_at_once(start: Start) -> None:
    worker = start()
    read_until(worker, lambda event: event.get("event") == "ready")
    assert stop(worker, signal.SIGTERM) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_loading_worker_ends_at_once(start: Start, number: signal.Signals) -> None:
    worker = start()
    wait_for_main(worker)
    time.sleep(0.3)
    assert stop(worker, number) == []
    assert worker.stderr is not None
    assert f"stopped by {number.name}" in worker.stderr.read()


def test_a_hangup_that_was_ignored_at_the_start_stays_ignored(start: Start) -> None:
    """As under nohup: while it loads, between requests and with a request in flight."""
    worker = start(hangup=signal.SIG_IGN)
    wait_for_main(worker)
    worker.send_signal(signal.SIGHUP)
    read_until(worker, lambda event: event.get("event") == "ready")
    worker.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    send(worker, {"id": "a", "token_ids": [5], "max_tokens": 100, "ignore_eos": True})
    read_until(worker, lambda event: event.get("id") == "a")
    worker.send_signal(signal.SIGHUP)
    output, _ = worker.communicate(timeout=60)
    assert worker.returncode == 0
    assert '"completion_tokens":100' in output
    assert "error" not in output


def test_a_quit_signal_keeps_its_default(start: Start) -> None:
    """It ends the process at once with a core dump, for debugging."""
    worker = start()
    resource.prlimit(worker.pid, resource.RLIMIT_CORE, (0, 0))
    read_until(worker, lambda event: event.get("event") == "ready")
    worker.send_signal(signal.SIGQUIT)
    assert worker.wait(timeout=30) == -signal.SIGQUIT


def test_a_long_step_reports_waiting_requests_too(start_slow: Start) -> None:
    worker = start_slow()
    read_until(worker, lambda event: event.get("event") == "ready")
    send(worker, LONG)
    time.sleep(0.5)
    send(worker, {"id": "next", "token_ids": [5], "max_tokens": 8}, {"id": "bad"})
    time.sleep(0.2)
    events = stop(worker, signal.SIGTERM)
    assert [(event["id"], event["error"]["type"]) for event in events] == [
        ("long", "internal"),
        ("next", "internal"),
        ("bad", "invalid_request"),
    ]
    assert [event["error"]["message"] for event in events[:2]] == ["the worker was stopped by SIGTERM"] * 2


def test_a_long_step_with_a_closed_output(start_slow: Start) -> None:
    worker = start_slow()
    read_until(worker, lambda event: event.get("event") == "ready")
    send(worker, LONG)
    time.sleep(0.5)
    assert worker.stdout is not None
    worker.stdout.close()
    began = time.monotonic()
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=30) == 128 + signal.SIGTERM
    assert time.monotonic() - began < LIMIT


def test_a_client_that_does_not_read(start: Start) -> None:
    worker = start()
    read_until(worker, lambda event: event.get("event") == "ready")
    request = {"token_ids": [5, 6], "max_tokens": 200, "ignore_eos": True, "show_logits": True}
    send(worker, *(request | {"id": f"r{i}"} for i in range(60)))
    sizes = [-1]
    while sizes[-1] < 32_000 or sizes[-1] != sizes[-2]:  # until its output pipe is full
        time.sleep(1)
        sizes.append(num_unread(worker))
    began = time.monotonic()
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=30) == 128 + signal.SIGTERM
    assert time.monotonic() - began < LIMIT


def num_unread(worker: subprocess.Popen[str]) -> int:
    """The number of unread bytes in its output pipe."""
    assert worker.stdout is not None
    found = array.array("i", [0])
    fcntl.ioctl(worker.stdout, termios.FIONREAD, found)
    return found[0]


def wait_for_main(worker: subprocess.Popen[str]) -> None:
    """Waits until main() has blocked the signals. Loading the CUDA libraries before that takes a while."""
    status = Path(f"/proc/{worker.pid}/status")
    while not int(status.read_text().split("SigBlk:")[1].split()[0], 16) >> (signal.SIGINT - 1) & 1:
        assert worker.poll() is None
        time.sleep(0.01)


def test_the_end_of_input_is_not_a_stop(start: Start) -> None:
    worker = start()
    send(worker, {"id": "a", "token_ids": [5], "max_tokens": 3, "ignore_eos": True})
    output, _ = worker.communicate(timeout=60)
    assert worker.returncode == 0
    assert '"finished":true' in output
