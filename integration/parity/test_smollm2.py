"""SmolLM2: native and Python model give equal bytes, and three ranks give the tokens of one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

LIMITS = ("--max_seqs_per_batch=4", "--max_model_len=256", "--num_blocks=64")
TEXTS = ["The capital of France is", "Once upon a time, in a small village,", "def fibonacci(n):\n"]


@pytest.fixture(scope="session")
def batches(smollm2: Path) -> list[list[dict[str, Any]]]:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    return [
        [
            {
                "id": str(i),
                "token_ids": tokenizer.encode(text).ids,
                "max_tokens": 16,
                "ignore_eos": True,
                "show_logits": True,
            }
            for i, text in enumerate(TEXTS)
        ]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_and_python_give_equal_bytes(
    smollm2: Path, run_workload: Callable[..., Any], batches: list[list[dict[str, Any]]], dtype: str
) -> None:
    python = run_workload(smollm2, f"--dtype={dtype}", *LIMITS, batches=batches)
    native = run_workload(smollm2, "--model_impl=native", f"--dtype={dtype}", *LIMITS, batches=batches)
    assert native.events == python.events


@pytest.mark.slow
def test_three_ranks_give_the_tokens_of_one(
    smollm2: Path, run_workload: Callable[..., Any], batches: list[list[dict[str, Any]]]
) -> None:
    """9 heads and 3 kv heads: one kv head per rank."""
    one = run_workload(smollm2, "--dtype=float32", *LIMITS, batches=batches)
    three = run_workload(smollm2, "--dtype=float32", *LIMITS, "--tp_size=3", batches=batches)
    assert three.tokens() == one.tokens()
    assert three.stats["executor"]["tensor_parallel"]["size"] == 3


@pytest.mark.slow
def test_two_ranks_are_refused(smollm2: Path, worker_path: Path) -> None:
    command = [str(worker_path), f"--model={smollm2}", "--device=cpu", "--tp_size=2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)
    assert (result.returncode, result.stdout) == (1, "")
    assert "error: num_attention_heads 9 is not divisible by tp_size 2\n" in result.stderr
