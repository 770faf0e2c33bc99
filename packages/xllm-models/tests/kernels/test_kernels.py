"""Runs the kernel cases: in Triton's interpreter everywhere, compiled where there is a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import xllm_models

KERNELS = Path(xllm_models.__file__).with_name("kernels")
CASES = Path(__file__).with_name("kernel_cases.py")


def run_cases(**environment: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_interpreted_kernels_agree_with_torch() -> None:
    run_cases(TRITON_INTERPRET="1", XLLM_KERNEL_DEVICE="cpu")


@pytest.mark.parametrize("size", [2, 3])
def test_interpreted_ranks_sum_and_gather_through_shared_memory(tmp_path: Path, size: int) -> None:
    from xllm_models.kernels.symmetric_buffers import buffer_bytes

    files = [tmp_path / f"memory{rank}" for rank in range(size)]
    for file in files:
        file.touch()
        os.truncate(file, buffer_bytes(size))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(CASES.with_name("shared_memory_rank.py")), str(rank), *map(str, files)],
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0] * size, errors


def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    command = [sys.executable, str(CASES.with_name("compile_kernels.py"))]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-6000:]
    sources = "".join(path.read_text(encoding="utf-8") for path in KERNELS.glob("*.py"))
    assert sorted(re.findall(r"^def (_\w+_kernel)\(", sources, flags=re.MULTILINE)) == done.stdout.split()


@pytest.mark.gpu
def test_compiled_kernels_agree_with_torch() -> None:
    run_cases(XLLM_KERNEL_DEVICE="cuda")


@pytest.mark.gpu
def test_two_ranks_on_two_streams_sum_and_gather() -> None:
    command = [sys.executable, str(CASES.with_name("two_streams.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr[-4000:]
