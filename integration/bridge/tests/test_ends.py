"""Ends of the process, forks, sub-interpreters, output before the start's end, and typed errors."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

SUB_INTERPRETER = (
    "UsageError: called from a Python sub-interpreter: the bridge and torch belong to the main interpreter"
)


def check(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout}{result.stderr}"
    return result


@pytest.mark.parametrize("plugin", [False, True], ids=["program", "plugin"])
@pytest.mark.parametrize("way", ["return", "exit", "thread"])
def test_statics_made_in_a_running_call_outlive_it(run_scenario: Run, way: str, plugin: bool) -> None:
    result = run_scenario("exit_after_a_late_static", way, plugin=plugin, timeout=30)
    assert (result.returncode, result.stdout, result.stderr) == (7, "", "")


@pytest.mark.parametrize("way", ["return", "exit", "thread"])
def test_the_process_ends_while_another_thread_loads_and_runs_first_steps(run_scenario: Run, way: str) -> None:
    """libtorch makes statics during the load and at the first use of an op."""
    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(lambda delay: run_scenario("exit_in_first_load", f"{way}:{delay}"), range(0, 1000, 100)):
            assert (result.returncode, result.stdout, result.stderr) == (7, "", "")


@pytest.mark.parametrize("plugin", [False, True], ids=["program", "plugin"])
def test_a_loop_without_a_handler_blocks_and_the_exit_code_is_the_programs(run_scenario: Run, plugin: bool) -> None:
    for _ in range(3):
        result = run_scenario("return_while_a_loop_runs", plugin=plugin, timeout=30)
        assert (result.returncode, result.stderr) == (5, "")


def test_a_fork_beside_a_step_refuses_calls_and_ends_at_once(run_scenario: Run) -> None:
    for _ in range(3):
        refusal, numbers = check(run_scenario("fork", timeout=60)).stdout.splitlines()
        assert refusal.startswith("InterpreterEnded: this process is a fork of the one that started Python")
        child = json.loads(numbers)
        assert child["code"] == 3
        assert child["seconds"] < 4  # the wait for calls of threads that are not there took 5 s


def test_a_call_from_a_sub_interpreter_is_refused(run_scenario: Run) -> None:
    assert check(run_scenario("sub_interpreter", timeout=60)).stdout.splitlines() == [SUB_INTERPRETER] * 3


def test_a_moved_from_handle_says_so(run_scenario: Run) -> None:
    lines = check(run_scenario("moved_from")).stdout.splitlines()
    message = "UsageError: this {} was moved from: use the handle that it was moved to"
    assert lines == [message.format("PyCausalLM")] * 7 + [message.format("PyExecutor")] * 6


def test_errors_have_types(run_scenario: Run) -> None:
    lines = check(run_scenario("error_types")).stdout.splitlines()
    beginnings = [
        "RefusedStep: ValueError: max_seq_len 1048576 exceeds max_model_len 64",
        "RefusedStep: ValueError: tokens is an undefined tensor; it must be [T] int32",
        "RefusedStep: TypeError: a",
        "OutOfMemory: torch.OutOfMemoryError: b",
        "OutOfMemory: MemoryError: c",
        "OutOfMemory: RuntimeError: [enforce fail at alloc_cpu.cpp:121]",
        "PythonError: RuntimeError: d",
        "PythonError: KeyError: 'e'",
        "PythonError: FileNotFoundError: model directory ",
        "InterpreterEnded: Python was shut down by PythonRuntime::shutdown",
    ]
    assert len(lines) == len(beginnings)
    assert all(line.startswith(beginning) for line, beginning in zip(lines, beginnings, strict=True)), lines


@pytest.mark.parametrize("variables", [{"LC_ALL": "C.UTF-8"}, {"LC_ALL": "C"}, {"LC_CTYPE": "C.UTF-8", "LANG": "C"}])
def test_the_start_changes_no_locale(run_scenario: Run, variables: dict[str, str]) -> None:
    assert check(run_scenario("locale", **variables)).stdout == "C\n"


@pytest.fixture
def chatty(tmp_path: Path) -> dict[str, str]:
    """An environment whose site customisation prints, and whose torch prints while it is imported."""
    (tmp_path / "sitecustomize.py").write_text("print('from site', flush=True)\n")
    (tmp_path / "chatty.py").write_text("print('from torch', flush=True)\ndef load(): pass\n")
    metadata = tmp_path / "chatty-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: chatty\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nchatty = chatty:load\n")
    return {"PYTHONPATH": str(tmp_path)}


def test_what_site_and_torch_print_does_not_reach_stdout(run_scenario: Run, chatty: dict[str, str]) -> None:
    result = check(run_scenario("steps", 1, **chatty))
    assert (result.stdout, result.stderr) == ("", "from site\nfrom torch\n")
    lines = check(run_scenario("sink", **chatty)).stdout.splitlines()
    assert lines[:2] == ["20|stdout|from site", "20|stdout|from torch"]


def test_a_sink_that_throws_fails_nothing(run_scenario: Run, chatty: dict[str, str]) -> None:
    lines = check(run_scenario("throwing_sink", **chatty)).stderr.splitlines()
    for text in ("stdout: from site", "stdout: from torch", "some.module: an error of logging", "stderr: to stderr"):
        assert f"the log sink threw: the disk is full; the record was: {text}" in lines


def test_children_of_python_get_the_flags_of_an_ordinary_start(run_scenario: Run) -> None:
    """The bridge imports the site module by itself, which Python marks as -S: a child would not find its packages."""
    flags = json.loads(check(run_scenario("where", PYTHONDONTWRITEBYTECODE="")).stderr)["flags"]
    assert flags == []


LINE = re.compile(r'(\w+)(?:\{((?:\w+="(?:[^"\\]|\\.)*",?)+)\})? (\S+)')
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def test_metrics_as_prometheus_text(run_scenario: Run) -> None:
    """Parsed as the text exposition format defines it: https://prometheus.io/docs/instrumenting/exposition_formats."""
    kinds: dict[str, str] = {}
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for line in check(run_scenario("metrics")).stdout.splitlines():
        if line.startswith("# HELP "):
            current = line.split(" ", 3)[2]
            continue
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == current
            assert name not in kinds
            kinds[name] = kind
            continue
        match = LINE.fullmatch(line)
        assert match, line
        assert match[1] == current
        unescaped = [
            (key, re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), text))
            for key, text in LABEL.findall(match[2] or "")
        ]
        samples[match[1], tuple(unescaped)] = float(match[3])
    own = (("model", "small"), ("runner", "host"))
    assert samples["xllm_executor_steps_total", (("model", "small"), ("runner", "eager"))] == 7
    assert samples["xllm_executor_execute_calls_total", own] == 7
    assert 0 < samples["xllm_executor_execute_seconds_total", own] < 60
    assert samples["xllm_executor_resident_memory_bytes", own] > 10**7
    assert samples["xllm_executor_eager_steps_total", (("model", "small"), ("reason", "graphs_off"), own[1])] == 7
    assert samples["xllm_executor_plans_total", (("group", "0"), *own)] == 7
    assert samples["host_strange", (("label", 'a "b" \\ c\nd'), *own)] == 0.1
    assert kinds["host_strange"] == kinds["xllm_executor_resident_memory_bytes"] == "gauge"
    assert all(kind == ("counter" if name.endswith("_total") else "gauge") for name, kind in kinds.items())
