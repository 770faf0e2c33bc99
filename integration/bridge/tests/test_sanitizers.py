"""The hosts under sanitizers: clean for our code. Torch and Python themselves are as they were built."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sanitizers import ADDRESS_FLAGS, THREAD_FLAGS, TSAN_EXIT_CODE, TSAN_OPTIONS, without_randomized_addresses

Completed = subprocess.CompletedProcess[str]
Run = Callable[..., Completed]
SAMPLE = {"flag": True, "text": "é\n", "inner": {"count": 2, "names": ["a"]}, "inners": [{"count": 5, "names": ["c"]}]}


@pytest.fixture(scope="session")
def run_two_at_a_time(run_program: Run) -> Callable[..., list[Completed]]:
    """`run_two_at_a_time(commands, **environment)`: as many runs, each to its end."""

    def run(commands: Sequence[Sequence[object]], **environment: str) -> list[Completed]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda command: run_program(*command, timeout=300, **environment), commands))

    return run


def made_by_us(trace: str) -> bool:
    """Whether our code comes before Python's in a leak's trace: Python, never finalised, leaves blocks of its own."""
    for frame in trace.splitlines():
        if re.search(r" (Include|Modules|Objects|Parser|Python)/|libpython|libtorch_python", frame):
            return False
        if re.search(r"xllm_\w+::|hosts::", frame):
            return True
    return False


def test_no_misuse_of_memory_and_no_undefined_behaviour(
    build_host: Callable[..., Path],
    run_program: Run,
    run_two_at_a_time: Callable[..., list[Completed]],
    checkpoint: Path,
    small_checkpoint: Path,
    recorder: Path,
    tmp_path: Path,
) -> None:
    """A leak counts when our code made the block."""
    programs = build_host("bridge_host", "contract_host", "lifecycle_host", flags=ADDRESS_FLAGS, build_type="None")
    environment = {
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=1",
        "LSAN_OPTIONS": "exitcode=0",
        "OMP_NUM_THREADS": "1",
    }
    lifecycle = (programs / "lifecycle_host", small_checkpoint, sys.executable)
    scenarios = (
        *("compatible", "shutdown_first", "shutdown_during_steps", "sink", "throwing_sink"),
        *("error_types", "moved_from", "sub_interpreter", "fork", "metrics"),
    )
    drive = (programs / "bridge_host", checkpoint, sys.executable, recorder, "drive")
    planted, *runs = run_two_at_a_time(
        [(*lifecycle, "leak"), drive, *((*lifecycle, scenario) for scenario in scenarios), (*lifecycle, "threads", 1)],
        XLLM_RECORD=str(tmp_path / "record.jsonl"), **environment,
    )  # fmt: skip
    request = json.dumps({"call": "sample", "value": SAMPLE}) + "\n"
    contract = run_program(programs / "contract_host", sys.executable, stdin=request, timeout=300, **environment)
    assert [trace for trace in planted.stderr.split("\n\n") if "leak of" in trace and made_by_us(trace)], planted.stderr
    for run in (*runs, contract):
        assert run.returncode == 0, run.stderr
        assert "runtime error" not in run.stderr, run.stderr
        assert "AddressSanitizer: heap" not in run.stderr, run.stderr
        ours = [trace for trace in run.stderr.split("\n\n") if "leak of" in trace and made_by_us(trace)]
        assert not ours, ours[0]
    assert SAMPLE.items() <= json.loads(contract.stdout)["value"].items()
    assert runs[0].stdout.count("\n") > 10


def test_no_data_races(
    build_host: Callable[..., Path],
    run_two_at_a_time: Callable[..., list[Completed]],
    checkpoint: Path,
    small_checkpoint: Path,
    recorder: Path,
    tmp_path: Path,
) -> None:
    """What threads do together. The GIL's own lock is seen: what it guards is clean because of it."""
    programs = build_host("bridge_host", "lifecycle_host", flags=THREAD_FLAGS, build_type="None")
    prefix = without_randomized_addresses()
    lifecycle = (*prefix, programs / "lifecycle_host", small_checkpoint, sys.executable)
    scenarios: list[tuple[object, ...]] = [
        *(("threads", 1), ("shutdown_during_steps",), ("join_and_shut_down",), ("gil_loss", 0.2)),
        *(("join_twice",), ("join_and_shut_down_twice",), ("steps_on_python_threads",)),
        *(("exit_from_main",), ("exit_from_thread",), ("exit_during_a_destructor",), ("error_types",)),
        *(("exit_in_first_load", "return:0"), ("exit_in_first_load", "thread:500")),
        *(("exit_after_a_late_static", "thread"), ("return_while_a_loop_runs",)),
    ]
    drive = (*prefix, programs / "bridge_host", checkpoint, sys.executable, recorder, "drive")
    planted, *runs = run_two_at_a_time(
        [(*lifecycle, "race"), drive, *((*lifecycle, *scenario) for scenario in scenarios)],
        TSAN_OPTIONS=TSAN_OPTIONS,
        XLLM_RECORD=str(tmp_path / "record.jsonl"),
        OMP_NUM_THREADS="1",
    )
    assert planted.returncode == TSAN_EXIT_CODE, planted.stderr
    assert "data race" in planted.stderr
    assert "hosts::race()" in planted.stderr
    codes = {"exit_in_first_load": 7, "exit_after_a_late_static": 7, "return_while_a_loop_runs": 5}
    for run, scenario in zip(runs, [("drive",), *scenarios], strict=True):
        assert "ThreadSanitizer" not in run.stderr, (scenario, run.stderr)
        assert run.returncode == codes.get(str(scenario[0]), 0), (scenario, run.stderr)
