"""Descriptors 0, 1 and 2 as a parent may leave them: closed, non-blocking, full, or not readable."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

SETTINGS = {
    "num_blocks": 64,
    "block_size": 4,
    "max_model_len": 60,
    "max_seqs": 4,
    "max_tokens": 16,
    "vocab_size": 100,
}
REQUESTS = [{"id": f"r{i}", "token_ids": [i + 1, 2], "max_tokens": 40} for i in range(40)]
LINES = "".join(json.dumps(request) + "\n" for request in REQUESTS).encode()

Ends = Callable[[], tuple[int, int]]  # -> (read end, write end)


def pipe() -> tuple[int, int]:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    return read, write


def stream() -> tuple[int, int]:
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return ours.detach(), theirs.detach()


def terminal() -> tuple[int, int]:
    ours, theirs = os.openpty()
    return ours, theirs


def read_slowly(descriptor: int) -> bytes:
    """Everything, in pieces with pauses, so that the writer finds no room again and again."""
    found = b""
    while True:
        try:
            piece = os.read(descriptor, 3000)
        except OSError:  # a terminal without a writer
            piece = b""
        if not piece:
            return found
        found += piece
        time.sleep(0.002)


def command(probe_path: Path, **changes: Any) -> list[str]:
    return [str(probe_path), "serve", json.dumps({**SETTINGS, **changes})]


@pytest.mark.parametrize("ends", [pipe, stream, terminal])
@pytest.mark.parametrize("blocking", [False, True])
def test_a_slow_reader_gets_every_event(probe_path: Path, ends: Ends, blocking: bool) -> None:
    read, write = ends()
    os.set_blocking(write, blocking)
    with subprocess.Popen(command(probe_path), stdin=subprocess.PIPE, stdout=write, stderr=subprocess.PIPE) as probe:
        os.close(write)
        assert probe.stdin is not None
        assert probe.stderr is not None
        probe.stdin.write(LINES)
        probe.stdin.close()
        output = read_slowly(read)
        assert probe.wait(timeout=60) == 0, probe.stderr.read()
    os.close(read)
    events = [json.loads(line) for line in output.splitlines()]
    assert sum(len(event.get("token_ids", [])) for event in events) == 40 * len(REQUESTS)
    assert {event["id"] for event in events if event.get("finished")} == {request["id"] for request in REQUESTS}


def test_an_input_that_does_not_block(probe_path: Path) -> None:
    """Two readers share the description, so a read can find nothing although poll() saw input."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    with subprocess.Popen(command(probe_path), stdin=read, stdout=subprocess.PIPE) as probe:
        for _ in range(200):
            os.write(write, b"\n" * 100)
            try:
                os.read(read, 1 << 16)
            except BlockingIOError:
                continue
        time.sleep(0.1)
        os.write(write, b"\n" + LINES)
        os.close(write)
        output, _ = probe.communicate(timeout=60)
    os.close(read)
    assert probe.returncode == 0
    assert output.count(b'"finished":true') == len(REQUESTS)


def test_logs_that_find_no_room_come_later(probe_path: Path) -> None:
    """stderr does not block, and is full for a while. Each failed step still has its line."""
    read, write = pipe()
    os.set_blocking(write, False)
    lines = b"".join(
        json.dumps({"id": f"r{i}", "token_ids": [13], "max_tokens": 1}).encode() + b"\n" for i in range(300)
    )
    with subprocess.Popen(
        command(probe_path, fail_on=13, max_seqs=1), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=write
    ) as probe:
        os.close(write)
        assert probe.stdin is not None
        probe.stdin.write(lines)
        probe.stdin.close()
        output = read_slowly(read)
        assert probe.wait(timeout=60) == 0
    os.close(read)
    assert output.count(b"token 13 cannot be computed") == 300


@pytest.mark.parametrize("blocking", [False, True])
def test_logs_that_nobody_reads_stop_nothing(probe_path: Path, blocking: bool) -> None:
    """A full stderr delays neither the answers nor the end after a signal."""
    read, write = pipe()
    os.set_blocking(write, blocking)
    lines = b"".join(
        json.dumps({"id": f"r{i}", "token_ids": [13], "max_tokens": 1}).encode() + b"\n" for i in range(300)
    )
    with subprocess.Popen(
        command(probe_path, fail_on=13, max_seqs=1), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=write
    ) as probe:
        assert probe.stdin is not None
        assert probe.stdout is not None
        probe.stdin.write(lines)
        probe.stdin.flush()
        errors = [json.loads(probe.stdout.readline()) for _ in range(300)]
        assert {event["error"]["message"] for event in errors} == {"token 13 cannot be computed"}
        probe.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert probe.wait(timeout=30) == 128 + signal.SIGTERM
        assert time.monotonic() - began < 2
    os.close(read)
    os.close(write)


def run_without(closed: Sequence[int], arguments: Sequence[str], **kwargs: Any) -> subprocess.CompletedProcess[bytes]:
    """Runs the command with these descriptors closed."""
    redirections = " ".join({0: "<&-", 1: ">&-", 2: "2>&-"}[number] for number in closed)
    shell = ["sh", "-c", f'exec "$@" {redirections}', "sh", *arguments]
    return subprocess.run(shell, capture_output=True, timeout=120, check=False, **kwargs)


def test_a_closed_input_is_an_empty_one(probe_path: Path, worker_path: Path, llama: Path) -> None:
    result = run_without([0], command(probe_path))
    assert (result.returncode, result.stdout) == (0, b"")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for closed in ([0], [0, 2]):
        result = run_without(closed, [str(worker_path), f"--model={llama}", "--device=cpu"], env=environment)
        assert result.returncode == 0, result.stderr
        (line,) = result.stdout.splitlines()
        assert json.loads(line)["event"] == "ready"


@pytest.mark.parametrize("closed", [[1], [0, 1], [1, 2], [0, 1, 2]])
@pytest.mark.parametrize("program", ["probe", "worker", "help"])
def test_a_closed_output_is_refused(
    probe_path: Path, worker_path: Path, llama: Path, closed: list[int], program: str
) -> None:
    arguments = {
        "probe": command(probe_path),
        "worker": [str(worker_path), f"--model={llama}", "--device=cpu"],
        "help": [str(worker_path), "--help"],
    }
    result = run_without(closed, arguments[program], input=LINES)
    assert result.returncode == 1
    assert result.stderr == (b"" if 2 in closed else b"error: stdout is closed; it must be open for the events\n")


def test_no_file_gets_the_number_of_a_closed_descriptor(worker_path: Path, llama: Path) -> None:
    """A load opens many files; numbers 0 and 2 are /dev/null all the time."""
    with subprocess.Popen(
        ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", str(worker_path), f"--model={llama}", "--device=cpu"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as worker:  # fmt: skip
        seen: list[list[str]] = []
        while worker.poll() is None:
            with contextlib.suppress(OSError):  # before main(), or after the end
                files = [str(Path(f"/proc/{worker.pid}/fd/{number}").readlink()) for number in (0, 2)]
                seen.append(files)
            time.sleep(0.005)
        assert worker.stdout is not None
        assert b"ready" in worker.stdout.read()
    assert worker.returncode == 0
    null = ["/dev/null"] * 2
    assert null in seen
    assert all(files == null for files in seen[seen.index(null) :])  # the dynamic loader opens libraries before main()


def test_an_input_that_cannot_be_read_is_named(probe_path: Path, tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    result = subprocess.run(command(probe_path), stdin=folder, capture_output=True, timeout=60, check=False)
    os.close(folder)
    assert (result.returncode, result.stdout) == (0, b"")
    assert b"stdin: Is a directory" in result.stderr


def test_help_to_a_full_disk(worker_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run([worker_path, "--help"], stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (1, b"error: stdout: the help text cannot be written\n")


def test_a_reader_that_never_reads_delays_no_signal(probe_path: Path) -> None:
    """Its pipe is full and does not block."""
    read, write = pipe()
    os.set_blocking(write, False)
    with subprocess.Popen(command(probe_path, step_ms=1), stdin=subprocess.PIPE, stdout=write, bufsize=0) as probe:
        os.close(write)
        assert probe.stdin is not None
        probe.stdin.write(LINES)
        time.sleep(1)
        assert probe.poll() is None
        probe.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert probe.wait(timeout=30) == 128 + signal.SIGTERM
        assert time.monotonic() - began < 2
    os.close(read)
