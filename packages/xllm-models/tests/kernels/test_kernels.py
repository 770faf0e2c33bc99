"""Runs the kernel cases: in Triton's interpreter everywhere, compiled where there is a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("kernel_cases.py")


def run_cases(**environment: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_interpreted_kernels_agree_with_torch() -> None:
    run_cases(TRITON_INTERPRET="1", XLLM_KERNEL_DEVICE="cpu")


@pytest.mark.gpu
def test_compiled_kernels_agree_with_torch() -> None:
    run_cases(XLLM_KERNEL_DEVICE="cuda")
