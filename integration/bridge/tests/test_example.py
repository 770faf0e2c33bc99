"""The host of docs/embedding.md: built from the installed packages alone, moved to another folder, and run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

Run = Callable[..., subprocess.CompletedProcess[str]]
REPO = Path(__file__).resolve().parents[3]
EXAMPLE = REPO / "examples" / "embedding"
PROMPT = [5, 6, 7, 20, 31]
COUNT = 20  # more than a page


def test_the_docs_show_the_shipped_program() -> None:
    text = (REPO / "docs" / "embedding.md").read_text()
    shown = re.findall(r"```cpp\n(// Generates.*?)```", text, re.DOTALL)
    assert shown == [(EXAMPLE / "host.cpp").read_text()]
    assert len(shown[0].splitlines()) <= 130


def test_the_host_is_built_moved_and_run(
    tmp_path: Path, cmake_tools: tuple[str, str], run_program: Run, small_checkpoint: Path
) -> None:
    cmake, ninja = cmake_tools
    source, build, installed = tmp_path / "source", tmp_path / "build", tmp_path / "installed"
    shutil.copytree(EXAMPLE, source)
    cmakedir = run_program(sys.executable, "-m", "xllm_executor", "--cmakedir").stdout.strip()
    for command in (
        [
            *(cmake, "-G", "Ninja", "-S", source, "-B", build, f"-DCMAKE_MAKE_PROGRAM={ninja}"),
            *("-DCMAKE_CXX_FLAGS=-Wall -Wextra", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_UNITY_BUILD=ON"),
            *(f"-DPython_EXECUTABLE={sys.executable}", f"-Dxllm_executor_DIR={cmakedir}"),
        ],
        [cmake, "--build", build],
        [cmake, "--install", build, "--prefix", installed],
    ):
        result = run_program(*command, timeout=600)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "warning:" not in result.stdout + result.stderr, result.stdout
    moved = tmp_path / "elsewhere"
    installed.rename(moved)
    shutil.rmtree(source)
    shutil.rmtree(build)

    program = moved / "bin" / "xllm_host"
    result = run_program(program, small_checkpoint, COUNT, *PROMPT)
    assert result.returncode == 0, result.stderr
    reference = AutoModelForCausalLM.from_pretrained(small_checkpoint, dtype=torch.float32)
    generated = reference.generate(
        torch.tensor([PROMPT]), max_new_tokens=COUNT, min_new_tokens=COUNT, do_sample=False, use_cache=False
    )
    assert [int(line) for line in result.stdout.split()] == generated[0, len(PROMPT) :].tolist()
    assert f"xllm_executor_execute_calls_total {COUNT}\n" in result.stderr

    refused = run_program(program, small_checkpoint, 1, 50)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "refused: tokens[0] is 50; the vocabulary has 50 ids, 0 to 49\n"
    absent = run_program(program, tmp_path / "nowhere", 1, 5)
    assert absent.returncode == 1
    assert "FileNotFoundError: model directory" in absent.stderr
