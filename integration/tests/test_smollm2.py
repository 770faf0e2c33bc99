"""SmolLM2: the worker's tokens equal transformers', and the text front streams an answer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

Events = list[dict[str, Any]]
Serve = Callable[..., Events]
HfGreedy = Callable[[Path, list[list[int]], int, int | None], list[list[int]]]
Answers = Callable[[Events], dict[str, list[int]]]

FRONT = Path(__file__).parents[1] / "python"
TEXTS = [
    "The capital of France is",
    "Once upon a time, in a small village at the edge of a forest, there lived",
    "def fibonacci(n):\n",
    "Water",
    "List three reasons why people keep diaries, and say for each of them what it means for those who read the diary "
    "many years later, when its writer and all the people it speaks of are gone:\n\n1.",
]


@pytest.fixture(scope="session")
def prompts(smollm2: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in TEXTS]


@pytest.fixture(scope="session")
def expected(smollm2: Path, prompts: list[list[int]], hf_greedy: HfGreedy) -> list[list[int]]:
    """64 greedy tokens of transformers for each prompt."""
    return hf_greedy(smollm2, prompts, 64, None)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--max_seqs_per_batch=1"], []], ids=["one by one", "one batch"])
def test_tokens_equal_transformers(
    smollm2: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    serve: Serve,
    answers: Answers,
    flags: list[str],
) -> None:
    requests = [
        {"id": str(i), "token_ids": prompt, "max_tokens": 64, "ignore_eos": True} for i, prompt in enumerate(prompts)
    ]
    got = answers(serve(smollm2, requests, "--dtype=float32", "--max_model_len=512", *flags))
    assert [got[str(i)] for i in range(len(TEXTS))] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "answer", "notes"),
    [
        (["What is the capital of France?"], "The capital of France is Paris.\n", "8 tokens, the first after"),
        (["--raw", "--max-tokens", "8", TEXTS[0]], " Paris", "the answer is cut: it reached --max-tokens 8\n8 tokens"),
        (["--raw", "What is the capital of France?"], "\n", "the answer is empty\n1 tokens"),
    ],
    ids=["chat", "raw and cut", "raw and empty"],
)
def test_the_text_front_answers(
    smollm2: Path, worker_path: Path, arguments: list[str], answer: str, notes: str
) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "xllm_text", "--worker", worker_path, "--model", smollm2, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FRONT)},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(answer)
    assert notes in result.stderr
