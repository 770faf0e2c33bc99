"""Fixtures of the integration tests: the built worker, its probe, and small checkpoints.

XLLM_WORKER names a built worker; without it, one is built with cmake into the repository's build-worker folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "integration" / "python"))

TENSOR_MODES = ("batch", "sample")

Json = Any
Ask = Callable[[str, Json], Json]
RunProbe = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def worker_path() -> Path:
    """The worker's executable; the probes lie beside it."""
    if given := os.environ.get("XLLM_WORKER"):
        return Path(given)
    build = REPO / "build-worker"
    source = REPO / "integration" / "worker"
    configure = ["cmake", "-S", str(source), "-B", str(build), f"-DPython_EXECUTABLE={sys.executable}"]
    scripts = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(configure, check=True, env=env)
    subprocess.run(["cmake", "--build", str(build), "--parallel", "2"], check=True, env=env)
    return build / "xllm_worker"


@pytest.fixture(scope="session")
def probe_path(worker_path: Path) -> Path:
    """Drives the worker's core without a model."""
    return worker_path.with_name("xllm_core_probe")


@pytest.fixture(scope="session")
def ask(probe_path: Path) -> Iterator[Ask]:
    """`ask(mode, value)`: the probe's JSON answer. One process a mode, kept for the session."""
    processes: dict[str, subprocess.Popen[str]] = {}

    def ask_mode(mode: str, value: Json) -> Json:
        if mode not in processes:
            program = probe_path.with_name("xllm_tensor_probe") if mode in TENSOR_MODES else probe_path
            processes[mode] = subprocess.Popen(
                [str(program), mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        process = processes[mode]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(value) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield ask_mode
    for process in processes.values():
        process.communicate()
        assert process.returncode == 0


@pytest.fixture(scope="session")
def run_probe(probe_path: Path) -> RunProbe:
    """`run_probe(mode, *args, stdin="")`: one run to its end."""

    def run(mode: str, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command: Sequence[str] = [str(probe_path), mode, *args]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)

    return run
