"""Ranks that die, hang, fail, differ or never connect: all others end in time, with a message that names the rank."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

# Seconds from the fault until every process has ended.
LIMIT = 15.0

REQUEST = {"id": "r", "token_ids": [5, 6], "max_tokens": 8, "ignore_eos": True}

# A model with faults. On rank 1 only, token 13 kills the process, 17 stops it, 19 raises, 23 sleeps. Token 21 raises on
# every rank. DIE_IN_LOAD kills rank 1 while it loads. With SLOW_LOAD, rank 3 never finishes loading; rank 0 takes 4 s.
PLUGIN = """
import os
import signal
import time

from xllm_models.models.llama import LlamaForCausalLM


class FragileForCausalLM(LlamaForCausalLM):
    def load_weights(self, *args, **options):
        if self.tp.rank == 1 and "DIE_IN_LOAD" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        if "SLOW_LOAD" in os.environ:
            time.sleep({0: 4, 3: 3600}.get(self.tp.rank, 0))
        super().load_weights(*args, **options)

    def forward(self, input_ids, positions):
        tokens = set(input_ids.tolist())
        if 21 in tokens:
            raise ArithmeticError("21 is nobody's lucky token")
        if self.tp.rank == 1:
            if 13 in tokens:
                os.kill(os.getpid(), signal.SIGKILL)
            if 17 in tokens:
                os.kill(os.getpid(), signal.SIGSTOP)
            if 19 in tokens:
                raise ArithmeticError("19 is not a lucky token")
            if 23 in tokens:
                time.sleep(3600)
        return super().forward(input_ids, positions)
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def fragile(make_fragile: Callable[[str], tuple[Path, Path]]) -> tuple[Path, str]:
    """(checkpoint, flag) of the model above."""
    model, plugins = make_fragile(PLUGIN)
    return model, f"--python_model_path={plugins}"


@pytest.fixture
def start(worker_path: Path) -> Iterator[Start]:
    """`start(model, *flags, env={})`: starts a worker in its own session. Kills the rest of the session at the end."""
    started: list[subprocess.Popen[str]] = []

    def start_worker(model: Path, *flags: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(worker_path), f"--model={model}", "--device=cpu", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start_worker
    for process in started:
        for member in members(process.pid):
            os.kill(member, signal.SIGKILL)
        process.communicate()


def members(session: int) -> list[int]:
    """The running processes of a session, its leader included."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def follower(leader: subprocess.Popen[str]) -> int:
    """Waits for the process of rank 1 and returns its id."""
    while not (others := [pid for pid in members(leader.pid) if pid != leader.pid]):
        assert leader.poll() is None
        time.sleep(0.005)
    return others[0]


def send(process: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


def read(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    event: dict[str, Any] = json.loads(process.stdout.readline())
    return event


def ends(process: subprocess.Popen[str], begin: float) -> tuple[list[dict[str, Any]], str]:
    """Waits until the worker and all its ranks have ended, checks the time, and returns (events, errors)."""
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1, stderr
    while members(process.pid):
        assert time.monotonic() - begin < LIMIT
        time.sleep(0.01)
    assert time.monotonic() - begin < LIMIT, stderr
    return [json.loads(line) for line in stdout.splitlines()], stderr


def failures(events: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The messages of each request's error events."""
    messages: dict[str, list[str]] = {}
    for event in events:
        if "error" in event:
            messages.setdefault(event["id"], []).append(event["error"]["message"])
    return messages


def test_a_rank_killed_in_mid_step(fragile: tuple[Path, str], start: Start) -> None:
    model, flag = fragile
    worker = start(model, flag, "--tp_size=2")
    read(worker)
    send(worker, REQUEST)
    assert read(worker)["token_ids"]
    begin = time.monotonic()
    send(worker, REQUEST | {"id": "bad", "token_ids": [5, 13]})
    events, errors = ends(worker, begin)
    assert "error: rank 1 is gone: killed by signal 9 (Killed)" in errors
    assert failures(events)["bad"] == ["rank 1 is gone: killed by signal 9 (Killed)"]


def test_a_rank_killed_between_steps(fragile: tuple[Path, str], start: Start) -> None:
    worker = start(*fragile, "--tp_size=2")
    read(worker)
    begin = time.monotonic()
    os.kill(follower(worker), signal.SIGKILL)
    _, errors = ends(worker, begin)
    assert "error: rank 1 is gone: killed by signal 9 (Killed)" in errors


@pytest.mark.parametrize("commands", [[], ["stats"]], ids=["idle", "asked"])
def test_a_rank_killed_under_pause(fragile: tuple[Path, str], start: Start, commands: list[str]) -> None:
    worker = start(*fragile, "--tp_size=2")
    read(worker)
    send(worker, {"command": "pause"})
    send(worker, REQUEST)
    time.sleep(0.5)
    begin = time.monotonic()
    os.kill(follower(worker), signal.SIGKILL)
    for command in commands:
        send(worker, {"command": command})
    send(worker, REQUEST | {"id": "next"})
    while worker.poll() is None:  # the input is still open
        assert time.monotonic() - begin < LIMIT
        time.sleep(0.01)
    events, errors = ends(worker, begin)
    message = "rank 1 is gone: killed by signal 9 (Killed)"
    assert f"error: {message}" in errors
    assert failures(events) == {"r": [message], "next": [message]}


def test_a_rank_killed_at_rendezvous(llama: Path, start: Start) -> None:
    worker = start(llama, "--tp_size=2")
    victim = follower(worker)
    begin = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    _, errors = ends(worker, begin)
    assert "error: rank 1 exited before it connected: killed by signal 9 (Killed)" in errors


def test_a_rank_killed_at_load(fragile: tuple[Path, str], start: Start) -> None:
    begin = time.monotonic()
    worker = start(*fragile, "--tp_size=2", env={"DIE_IN_LOAD": "1"})
    _, errors = ends(worker, begin)
    assert "error: rank 1 is gone: killed by signal 9 (Killed)" in errors


def test_a_rank_that_does_not_load(fragile: tuple[Path, str], start: Start) -> None:
    worker = start(*fragile, "--tp_size=4", "--tp_start_timeout=10", env={"SLOW_LOAD": "1"})
    _, errors = worker.communicate(timeout=120)
    assert worker.returncode == 1
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert lines
    assert all(line.endswith("rank 3 did not load the model within 10 s") for line in lines), lines


@pytest.mark.parametrize(
    ("token", "flags", "message"),
    [
        pytest.param(17, ["--tp_timeout=3"], "rank 1 sent no heartbeat for 3 s", id="hangs"),
        pytest.param(
            23,
            ["--tp_timeout=3"],
            "step 1 did not end within 3 s: rank 1 did not reach the collective where the others wait",
            id="does-not-reach-a-collective",
        ),
        pytest.param(
            19, [], "rank 1 failed in step 1: ArithmeticError: 19 is not a lucky token", id="fails-on-one-rank"
        ),
    ],
)
def test_a_fault_of_one_rank_in_a_step(
    fragile: tuple[Path, str], start: Start, token: int, flags: list[str], message: str
) -> None:
    worker = start(*fragile, "--tp_size=2", *flags)
    read(worker)
    begin = time.monotonic()
    send(worker, REQUEST | {"token_ids": [5, token]})
    events, errors = ends(worker, begin)
    assert f"error: {message}" in errors
    assert failures(events) == {"r": [message]}


def test_a_step_that_fails_on_all_ranks_fails_only_its_requests(fragile: tuple[Path, str], start: Start) -> None:
    worker = start(*fragile, "--tp_size=2")
    read(worker)
    send(worker, REQUEST | {"id": "bad", "token_ids": [5, 21]})
    assert read(worker)["error"]["message"] == "ArithmeticError: 21 is nobody's lucky token"
    send(worker, REQUEST)
    stdout, errors = worker.communicate(timeout=60)
    assert worker.returncode == 0, errors
    assert json.loads(stdout.splitlines()[-1])["completion_tokens"] == 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_ranks_is_an_orderly_end(llama: Path, start: Start, number: signal.Signals) -> None:
    """As Ctrl-C in a terminal and torchrun do."""
    worker = start(llama, "--tp_size=2")
    read(worker)
    send(worker, {"command": "pause"})
    send(worker, REQUEST)
    time.sleep(0.5)
    begin = time.monotonic()
    os.killpg(worker.pid, number)
    stdout, errors = worker.communicate(timeout=60)
    assert (worker.returncode, errors) == (128 + number, "")
    assert number.name in json.loads(stdout.splitlines()[-1])["error"]["message"]
    while members(worker.pid):
        assert time.monotonic() - begin < LIMIT
        time.sleep(0.01)


def test_a_signal_while_a_stopped_rank_is_asked_for_its_stats(llama: Path, start: Start) -> None:
    worker = start(llama, "--tp_size=2")
    read(worker)
    send(worker, {"command": "pause"})
    send(worker, REQUEST)
    time.sleep(0.5)
    os.kill(follower(worker), signal.SIGSTOP)
    send(worker, {"command": "stats"})
    send(worker, REQUEST | {"id": "next"})
    time.sleep(0.5)
    begin = time.monotonic()
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=30) == 128 + signal.SIGTERM
    assert time.monotonic() - begin < 2
    stdout, _ = worker.communicate(timeout=60)
    message = "the worker was stopped by SIGTERM"
    assert failures([json.loads(line) for line in stdout.splitlines()]) == {"r": [message], "next": [message]}


def test_the_leader_killed(llama: Path, start: Start) -> None:
    worker = start(llama, "--tp_size=2")
    read(worker)
    assert len(members(worker.pid)) == 2
    begin = time.monotonic()
    worker.kill()
    worker.communicate()
    while members(worker.pid):
        assert time.monotonic() - begin < LIMIT
        time.sleep(0.01)


@pytest.fixture
def port() -> int:
    """A free one."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        number: int = listener.getsockname()[1]
    return number


def test_a_rank_that_never_connects(llama: Path, start: Start, port: int) -> None:
    flags = [f"--tp_port={port}", "--tp_size=4", "--tp_start_timeout=4"]
    begin = time.monotonic()
    leader = start(llama, "--tp_rank=0", *flags)
    other = start(llama, "--tp_rank=2", *flags)
    message = f"rank 1, 3 did not connect to 127.0.0.1:{port} within 4 s"
    assert message in ends(leader, begin)[1]
    assert message in ends(other, begin)[1]


HELLOS = [
    b"",
    b"{",
    b"[" * 100_000,
    b'{"rank": ' * 20,
    b"[1]",
    b"7",
    b'{"rank": "1", "size": 2}',
    b'{"rank": null, "size": []}',
    b'{"rank": 1}',
    b'{"rank": 1, "rank": 1, "size": 2}',
    b'{"rank": 1, "size": 2}\0',
    b'{"rank": 1, "size": 2}' + b" " * 300,
    b"\xff",
]


def test_strangers_that_connect_to_the_leader(llama: Path, start: Start, port: int) -> None:
    """Whatever is no hello of a rank is dropped, and the ranks still find each other."""
    flags = [f"--tp_port={port}", "--tp_size=2"]
    leader = start(llama, "--tp_rank=0", *flags)
    store = TCPStore("127.0.0.1", port, is_master=False)
    host, _, link_port = store.get("xllm_worker/0/link").decode().rpartition(":")
    frames = [b"\1" + struct.pack("=Q", len(hello)) + hello for hello in HELLOS]
    frames += [b"\1" + struct.pack("=Q", 2**63), b"\7" + struct.pack("=Q", 2) + b"{}", b"GET / HTTP/1.1\r\n\r\n", b""]
    for frame in frames:
        stranger = socket.create_connection((host, int(link_port)), timeout=20)
        with stranger, contextlib.suppress(OSError):  # the leader may close it first
            stranger.sendall(frame)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
    assert leader.poll() is None
    start(llama, "--tp_rank=1", *flags)
    assert read(leader)["event"] == "ready"
    send(leader, REQUEST)
    while not read(leader).get("finished"):
        pass


def test_a_leader_that_never_starts(llama: Path, start: Start, port: int) -> None:
    begin = time.monotonic()
    other = start(llama, "--tp_rank=1", "--tp_size=2", f"--tp_port={port}", "--tp_start_timeout=2")
    _, errors = ends(other, begin)
    assert f"no answer at 127.0.0.1:{port}, the address of rank 0, within 2 s" in errors


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"rms_norm_eps": 1e-3}, [], "rank 1 differs from rank 0: config rms_norm_eps is 0.001, rank 0 has 1e-06"),
        ({}, ["--dtype=bfloat16"], 'rank 1 differs from rank 0: dtype is "bfloat16", rank 0 has "float32"'),
        ({}, ["--num_blocks=7"], "rank 1 differs from rank 0: num_blocks is 7, rank 0 has "),
        ({}, ["--tp_size=3"], "rank 1 was started with tp_size 3, rank 0 with 2"),
    ],
    ids=["config", "dtype", "cache", "size"],
)
def test_a_rank_with_another_config(
    llama: Path,
    copy_of_llama: Path,
    start: Start,
    port: int,
    changes: dict[str, Any],
    flags: list[str],
    message: str,
) -> None:
    config = json.loads((copy_of_llama / "config.json").read_text())
    (copy_of_llama / "config.json").write_text(json.dumps(config | changes))
    both = [f"--tp_port={port}"]
    begin = time.monotonic()
    leader = start(llama, "--tp_rank=0", "--tp_size=2", *both)
    size = [] if any("tp_size" in flag for flag in flags) else ["--tp_size=2"]
    other = start(copy_of_llama, "--tp_rank=1", *size, *both, *flags)
    for process in (leader, other):
        _, errors = ends(process, begin)
        assert message in errors


def test_a_rank_with_other_weights(llama: Path, copy_of_llama: Path, start: Start, port: int) -> None:
    from safetensors.torch import load_file, save_file

    path = copy_of_llama / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][5] *= 2
    save_file(tensors, path, metadata={"format": "pt"})
    flags = ["--tp_size=2", f"--tp_port={port}"]
    begin = time.monotonic()
    leader = start(llama, "--tp_rank=0", *flags)
    start(copy_of_llama, "--tp_rank=1", *flags)
    _, errors = ends(leader, begin)
    assert "rank 1 differs from rank 0: weights model.norm.weight is " in errors


def test_a_model_that_cannot_be_sharded(llama: Path, start: Start) -> None:
    begin = time.monotonic()
    worker = start(llama, "--tp_size=3")
    _, errors = ends(worker, begin)
    assert "error: num_attention_heads 4 is not divisible by tp_size 3\n" in errors


def test_ranks_end_with_code_0_again_and_again(llama: Path, start: Start) -> None:
    for _ in range(3):
        worker = start(llama, "--tp_size=2", "--model_impl=native")
        stdout, errors = worker.communicate(json.dumps(REQUEST) + "\n", timeout=60)
        assert (worker.returncode, errors) == (0, "")
        assert json.loads(stdout.splitlines()[-1])["finished"]
        assert not members(worker.pid)


def test_torchrun_starts_the_ranks(llama: Path, worker_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node=2", "--standalone"]
    result = subprocess.run(
        [*command, str(worker_path), f"--model={llama}", "--device=cpu"],
        input=json.dumps(REQUEST) + '\n{"command": "stats"}\n',
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert events[0]["event"] == "ready"
    (stats,) = (event for event in events if event.get("event") == "stats")
    assert stats["executor"]["tensor_parallel"]["size"] == 2
    assert events[-1]["completion_tokens"] == 8
