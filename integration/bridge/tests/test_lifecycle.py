"""Lifecycle of the embedded interpreter: each scenario is one run of lifecycle_host, as a program or as a plugin."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

Completed = subprocess.CompletedProcess[str]
Run = Callable[..., Completed]
THIS_VERSION = sysconfig.get_python_version()
PACKAGES = Path(__file__).resolve().parents[3] / "packages"
QUIET = {"OMP_NUM_THREADS": "1"}


def check(result: Completed) -> Completed:
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout}{result.stderr}"
    return result


@pytest.mark.parametrize("plugin", [False, True], ids=["program", "plugin"])
def test_start_a_hundred_steps_exit_twenty_times(run_scenario: Run, plugin: bool) -> None:
    with ThreadPoolExecutor(2) as pool:  # a start keeps one core busy
        for result in pool.map(lambda _: check(run_scenario("steps", 100, plugin=plugin)), range(20)):
            assert result.stdout + result.stderr == ""


@pytest.mark.parametrize("plugin", [False, True], ids=["program", "plugin"])
@pytest.mark.parametrize("scenario", ["exit_from_main", "exit_from_thread"])
def test_exit_during_a_step_three_times(run_scenario: Run, scenario: str, plugin: bool) -> None:
    for _ in range(3):
        result = check(run_scenario(scenario, plugin=plugin, timeout=30))
        assert result.stderr in ("", "the process is exiting: Python takes no more calls\n")


PYTHON_HOST = """
import ctypes
import sys

import torch  # first, so that the plugin links to its libraries

plugin = ctypes.CDLL(sys.argv[1])
arguments = [argument.encode() for argument in sys.argv[1:]]
assert plugin.host_main(len(arguments), (ctypes.c_char_p * len(arguments))(*arguments)) == 0
sys.exit(7)
"""


def test_a_python_program_ends_during_a_step_three_times(hosts: Path, run_program: Run, small_checkpoint: Path) -> None:
    """The plugin joins the program's interpreter. Its finalisation waits until the plugin's thread is out of Python."""
    for _ in range(3):
        command = (
            sys.executable,
            "-c",
            PYTHON_HOST,
            hosts / "liblifecycle_plugin.so",
            small_checkpoint,
            sys.executable,
        )
        result = run_program(*command, "leave_a_thread_in_steps", timeout=60, **QUIET)
        assert result.returncode == 7, result.stderr
        assert result.stderr in ("", "the process is exiting: Python takes no more calls\n")


@pytest.mark.parametrize(
    ("scenario", "messages"),
    [
        ("execute_error", ["ValueError: max_seq_len 1048576 exceeds max_model_len 64"]),
        ("constructor_error", ["FileNotFoundError: model directory ", "ValueError: max_model_len is -1"]),
    ],
)
def test_exit_after_a_python_exception_three_times(run_scenario: Run, scenario: str, messages: list[str]) -> None:
    for _ in range(3):
        lines = check(run_scenario(scenario)).stdout.splitlines()
        assert len(lines) == len(messages)
        assert all(line.startswith(message) for line, message in zip(lines, messages, strict=True))


def test_exit_waits_for_a_destructor_on_another_thread_three_times(run_scenario: Run) -> None:
    for _ in range(3):
        assert check(run_scenario("exit_during_a_destructor")).stderr == "destroyed\n"


@pytest.mark.parametrize("plugin", [False, True], ids=["program", "plugin"])
def test_shutdown_then_exit(run_scenario: Run, plugin: bool) -> None:
    assert check(run_scenario("steps_and_shutdown", 20, plugin=plugin)).stderr == ""


@pytest.mark.parametrize("plugin", [False, True], ids=["program", "plugin"])
def test_shutdown_in_a_static_destructor(run_scenario: Run, plugin: bool) -> None:
    assert check(run_scenario("shutdown_in_a_static_destructor", plugin=plugin)).stderr == ""


def test_after_shutdown_every_call_is_refused(run_scenario: Run) -> None:
    lines = check(run_scenario("shutdown_first")).stdout.splitlines()
    assert lines[:4] == ["Python was shut down by PythonRuntime::shutdown"] * 4
    assert lines[4].startswith("Python was started before: one interpreter per process")


def test_shutdown_during_threads_that_make_use_and_destroy_hosts(run_scenario: Run) -> None:
    """Each host is destroyed by another thread. After shutdown every thread's next call throws, and none hangs."""
    for _ in range(3):
        lines = check(run_scenario("shutdown_during_steps", timeout=60)).stdout.splitlines()
        assert lines == ["Python was shut down by PythonRuntime::shutdown"] * 3


def test_shutdown_by_a_host_that_holds_the_gil(run_scenario: Run) -> None:
    result = check(run_scenario("join_and_shut_down", timeout=60))
    assert result.stdout.splitlines() == ["Python was shut down by PythonRuntime::shutdown"]


def test_start_and_shutdown_by_two_threads_of_which_one_holds_the_gil(run_scenario: Run) -> None:
    (refusal,) = check(run_scenario("join_twice", timeout=60)).stdout.splitlines()
    assert refusal.startswith("Python was started before: one interpreter per process")
    assert check(run_scenario("join_and_shut_down_twice", timeout=60)).stdout == ""


def test_steps_on_a_thread_that_python_has_never_seen(run_scenario: Run) -> None:
    check(run_scenario("steps_on_another_thread", 50))


def test_steps_on_threads_that_python_makes_and_ends(run_scenario: Run) -> None:
    assert check(run_scenario("steps_on_python_threads")).stderr == ""


def test_threads_do_not_deadlock(run_scenario: Run) -> None:
    """For a minute: steps under the host's lock, the GIL without the lock, and the lock without the GIL."""
    numbers = json.loads(check(run_scenario("threads", 60, timeout=90)).stdout)
    assert numbers["steps"] > 1000
    assert numbers["work"] > 1000


def test_cpp_threads_lose_nothing_to_the_gil(run_scenario: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """C++ work during Python steps, relative to C++ work during equal CPU use without Python; best of three."""
    numbers = json.loads(check(run_scenario("gil_loss", 3)).stdout)
    with capsys.disabled():
        print(f"\nC++ work during Python steps: {numbers['ratio']} of that during equal CPU use")
    assert numbers["ratio"] >= 0.95


def test_a_hundred_thousand_steps_leave_memory_flat(run_scenario: Run) -> None:
    numbers = json.loads(check(run_scenario("flat", 100_000, timeout=600)).stdout)
    assert numbers["objects_after"] <= numbers["objects_before"] * 1.01
    assert numbers["resident_after"] <= numbers["resident_before"] * 1.01


def test_the_hosts_signal_handlers_stay(run_scenario: Run) -> None:
    check(run_scenario("signals"))


def test_a_running_interpreter_is_joined(run_scenario: Run) -> None:
    assert check(run_scenario("join")).stderr == ""
    result = run_scenario("join_other")
    assert result.returncode == 1
    assert f"this process runs Python already, with {sys.executable}; /usr/bin/env was asked for" in result.stderr


def test_output_goes_to_the_sink(run_scenario: Run) -> None:
    result = check(run_scenario("sink"))
    assert result.stderr == ""
    records = [line.split("|", 2) for line in result.stdout.splitlines() if line.count("|") >= 2]
    assert ["40", "some.module", "an error of logging"] in records
    assert ["20", "stdout", "a printed line"] in records
    assert ["30", "stderr", "to stderr"] in records
    assert any(level == "30" and name == "py.warnings" and "a warning" in text for level, name, text in records)


def test_without_a_sink_nothing_reaches_stdout(run_scenario: Run) -> None:
    result = check(run_scenario("no_sink"))
    assert result.stdout == ""
    for text in ("an error of logging", "a warning", "a printed line", "to stderr"):
        assert text in result.stderr


def test_the_calling_order_of_xllms_bridge(run_scenario: Run) -> None:
    """Model from args, weights from the host's state dicts, mirrors completed, hidden states, then logits."""
    difference, error = check(run_scenario("compatible")).stdout.split("\n", 1)
    assert json.loads(difference) == {"difference": 0}
    assert "WeightError: the checkpoint does not fit the model" in error
    assert "missing: model.embed_tokens.weight" in error


def test_a_virtual_environment_with_editable_installs(run_scenario: Run, tmp_path: Path) -> None:
    """A fresh environment that sees third-party packages through a .pth file, and ours as editable installs."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    site = folder / "lib" / f"python{THIS_VERSION}" / "site-packages"
    (site / "third_party.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    editable = [part for package in sorted(PACKAGES.glob("xllm-*")) for part in ("--editable", str(package))]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, *editable]
    installed = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert installed.returncode == 0, installed.stderr
    where = json.loads(check(run_scenario("where", executable=python)).stderr)
    source = PACKAGES / "xllm-executor" / "src" / "xllm_executor" / "__init__.py"
    assert {key: where[key] for key in ("prefix", "torch", "xllm_executor")} == {
        "prefix": str(folder),
        "torch": torch.__file__,
        "xllm_executor": str(source),
    }
    assert check(run_scenario("steps", 5, executable=python)).stderr == ""


def test_a_plain_python_with_pythonpath(run_scenario: Run) -> None:
    """The base interpreter of the environment, which finds the packages by PYTHONPATH."""
    base = Path(sysconfig.get_config_var("BINDIR")) / f"python{THIS_VERSION}"
    paths = ":".join(path for path in sys.path if path.endswith(("site-packages", "/src")))
    where = json.loads(check(run_scenario("where", executable=base, PYTHONPATH=paths)).stderr)
    assert (where["prefix"], where["torch"]) == (sys.base_prefix, torch.__file__)
    assert check(run_scenario("steps", 5, executable=base, PYTHONPATH=paths)).stderr == ""


def test_the_environment_that_the_bridge_was_configured_for(run_scenario: Run) -> None:
    where = json.loads(check(run_scenario("where", executable="")).stderr)
    assert (where["prefix"], where["torch"]) == (sys.prefix, torch.__file__)


@pytest.mark.parametrize("kind", ["other_version", "not_python"])
def test_an_executable_that_does_not_fit(run_scenario: Run, tmp_path: Path, kind: str) -> None:
    fake = tmp_path / "python"
    body = {"other_version": "printf '3.99\\n/nowhere\\n'", "not_python": "exit 3"}[kind]
    fake.write_text(f"#!/bin/sh\n{body}\n")
    fake.chmod(0o755)
    message = {
        "other_version": f"{fake} is Python 3.99; this program is linked with libpython {THIS_VERSION}",
        "not_python": f"{fake} does not run (exit code 3)",
    }[kind]
    result = run_scenario("steps", 1, executable=fake)
    assert result.returncode == 1
    assert message in result.stderr


@pytest.mark.parametrize(
    ("package", "body", "message"),
    [
        ("torch", "__version__ = '1.0.0+cpu'\n", "torch in Python is 1.0.0+cpu; this program was built against "),
        ("torch", f"__version__ = '{torch.__version__}'\n", "torch in Python has its libraries in "),
        ("xllm_metadata", "def check_contract(*_): raise RuntimeError('they differ')\n", "they differ"),
    ],
)
def test_a_package_that_does_not_fit(run_scenario: Run, tmp_path: Path, package: str, body: str, message: str) -> None:
    """A fake package earlier on sys.path: the start compares it with the linked one."""
    (tmp_path / f"{package}.py").write_text(body)
    result = run_scenario("steps", 1, PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
