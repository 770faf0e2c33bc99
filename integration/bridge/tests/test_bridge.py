"""The bridge in a host outside the repository: built by find_package, no tensor copies, Python errors as C++ errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from xllm_metadata import FIELDS

NUM_LAYERS = 5
RunHost = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run_host(hosts: Path, run_program: RunHost) -> RunHost:
    """One run of bridge_host to its end."""

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return run_program(hosts / "bridge_host", *arguments, **environment)

    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """The host's output lines in order, and the lines that the recorder wrote in Python."""

    lines: list[dict[str, Any]]
    record: list[dict[str, Any]]
    stderr: str

    def events(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.record if line["event"] == event]


@pytest.fixture(scope="session")
def drive(run_host: RunHost, checkpoint: Path, recorder: Path, tmp_path_factory: pytest.TempPathFactory) -> Drive:
    record = tmp_path_factory.mktemp("record") / "record.jsonl"
    result = run_host(checkpoint, sys.executable, recorder, "drive", XLLM_RECORD=str(record))
    assert result.returncode == 0, result.stdout + result.stderr
    return Drive(
        lines=[json.loads(line) for line in result.stdout.splitlines()],
        record=[json.loads(line) for line in record.read_text().splitlines()],
        stderr=result.stderr,
    )


def steps(drive: Drive) -> list[dict[str, Any]]:
    return [line for line in drive.lines if "slot_mapping" in line]


def test_the_embedded_interpreter_is_the_environments(drive: Drive) -> None:
    assert drive.lines[0]["executable"] == sys.executable
    (environment,) = drive.events("environment")
    assert environment["prefix"] == sys.prefix
    assert environment["torch"] == torch.__file__
    assert drive.lines[1] == {"model_type": "llama", "n_layers": NUM_LAYERS, "vocab_size": 50}
    assert drive.stderr == ""


def test_every_tensor_python_sees_is_the_one_cpp_made(drive: Drive) -> None:
    plans, forwards, logits = drive.events("plan"), drive.events("forward"), drive.events("logits")
    assert len(steps(drive)) == 3
    for i, step in enumerate(steps(drive)):
        assert {field.name: plans[i][field.name] for field in FIELDS} == {f.name: step[f.name] for f in FIELDS}
        assert plans[i]["type"] == "AttentionMetadataView"
        assert plans[i]["alias_is_same"]
        assert {key: forwards[i][key] for key in ("tokens", "positions")} == {
            key: step[key] for key in ("tokens", "positions")
        }
        assert logits[i]["logits_indices"] == step["logits_indices"]
        assert (step["logits_rows"], step["logits_cols"]) == (1, 50)
    assert steps(drive)[0]["qo_indptr"]
    assert steps(drive)[1]["qo_indptr"] is None


def test_the_kv_cache_is_bound_once_and_is_cpps(drive: Drive) -> None:
    (bind,) = drive.events("bind")
    (printed,) = [line["caches"] for line in drive.lines if "caches" in line]
    assert bind["caches"] == printed
    assert len(printed) == NUM_LAYERS


def test_one_execute_and_one_plan_a_step(drive: Drive) -> None:
    (stats,) = [line["stats"] for line in drive.lines if "stats" in line]
    assert stats["steps"] == {"eager": 3}
    assert stats["plans"] == [3]
    # The three steps, one after the refused step, and one on another thread. The refused step does not reach the model.
    assert len(drive.events("forward")) == 5


def test_a_view_kept_past_its_step_raises(drive: Drive) -> None:
    kept = [plan["kept_view"] for plan in drive.events("plan")]
    assert len(kept) == 5
    assert kept[0] is None
    assert all("attention metadata was read after its step (slot_mapping)" in text for text in kept[1:])


def test_python_errors_become_cpp_errors_and_the_executor_goes_on(drive: Drive) -> None:
    errors = [line for line in drive.lines if "error" in line]
    refused, after, other_thread, bound_twice, option, nowhere, second_start, after_shutdown = errors
    assert refused["type"] == "ValueError"
    assert refused["message"] == "max_seq_len 1048576 exceeds max_model_len 64"
    assert refused["error"] == "ValueError: max_seq_len 1048576 exceeds max_model_len 64"
    assert "Traceback (most recent call last)" in refused["traceback"]
    assert after["error"] is None
    assert other_thread["error"] is None
    assert "an executor is bound once" in bound_twice["message"]
    assert "no_such_backend" in option["message"]
    assert nowhere["type"] == "FileNotFoundError"
    assert second_start["type"] is None
    assert "one interpreter per process" in second_start["error"]
    assert after_shutdown["error"] == "the executor was shut down"


def test_nothing_works_before_the_start(run_host: RunHost) -> None:
    result = run_host("nowhere", sys.executable, ".", "early")
    assert json.loads(result.stdout)["error"] == "Python is not started: call PythonRuntime::start first"


@pytest.mark.parametrize(
    ("executable", "environment", "message"),
    [
        ("/nonexistent/python", {}, "cannot start Python: /nonexistent/python does not run (exit code 127)"),
        (sys.executable, {"PYTHONHOME": "/usr/lib"}, "PYTHONHOME is /usr/lib, but"),
    ],
)
def test_an_environment_that_does_not_fit_is_one_clear_error(
    run_host: RunHost, executable: str, environment: dict[str, str], message: str
) -> None:
    result = run_host("nowhere", executable, ".", "start", **environment)
    assert result.returncode == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_missing_package_is_named(run_host: RunHost, tmp_path: Path) -> None:
    """In an environment without packages the start fails at an import; the error names environment and package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    result = run_host("nowhere", tmp_path / "bare" / "bin" / "python", ".", "start")
    assert result.returncode == 1
    python = tmp_path / "bare" / "bin" / "python"
    message = f"while starting Python with {python}: ModuleNotFoundError: No module named 'torch'"
    assert message in result.stderr
