"""`python -m xllm_executor`: the CMake directory, and `doctor`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from xllm_executor import doctor, get_cmake_dir


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "xllm_executor", *arguments], capture_output=True, text=True, check=False
    )


def test_cmakedir_holds_the_package() -> None:
    result = run("--cmakedir")
    assert result.stdout.strip() == get_cmake_dir()
    assert (Path(get_cmake_dir()) / "xllm_executor-config.cmake").is_file()


def test_the_doctor_finds_this_environment_well() -> None:
    result = run("doctor")
    assert result.returncode == 0, result.stdout
    for check in ("python", "libpython", "packages", "torch", "attention backends", "C++ side"):
        assert f"ok   {check}" in result.stdout


def test_the_doctor_reports_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", ("xllm-metadata", "xllm-nothing"))
    check = next(check for check in doctor.examine() if check.name == "packages")
    assert not check.ok
    assert "xllm-nothing missing" in check.finding


def test_a_call_without_a_request_is_an_error() -> None:
    for arguments in ((), ("--cmakedir", "doctor")):
        result = run(*arguments)
        assert result.returncode == 2
        assert "give either --cmakedir or a command, doctor or check" in result.stderr
