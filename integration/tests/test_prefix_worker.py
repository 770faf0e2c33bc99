"""The prefix cache end to end: with any cached prefix, tokens equal transformers', and the hits are counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from xllm_text.worker import Worker

HfGreedy = Callable[[Path, list[list[int]], int, int | None], list[list[int]]]

PAGE, NUM_TOKENS = 4, 12
BASE = [(37 * i + i * i) % 250 + 3 for i in range(40)]  # ten pages
REST = [(53 * i + 7) % 250 + 3 for i in range(9)]

# name: (prompt, number of its tokens that are cached when it arrives). Served one after the other.
PROMPTS = {
    "first": (BASE, 0),
    "the same": (BASE, 36),
    "its beginning and others": (BASE[:26] + REST, 24),
    "it and more": (BASE + REST, 40),
    "another": (BASE[::-1], 0),
    "only its end": (BASE[4:], 0),
}
NEXT_TURN = 48  # of 40 + 12 + 9 tokens; the last of the answer was never an input


@pytest.fixture(scope="session")
def checkpoint(small_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model. Its large weights make every token depend on all pages."""
    torch.manual_seed(8)
    folder = tmp_path_factory.mktemp("attentive")
    LlamaForCausalLM(LlamaConfig(**small_config, initializer_range=0.2)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def expected(checkpoint: Path, hf_greedy: HfGreedy) -> dict[str, tuple[list[int], list[int]]]:
    """(prompt, answer) by name. "next turn" continues the first prompt and its answer."""
    prompts = [prompt for prompt, _ in PROMPTS.values()]
    answers = hf_greedy(checkpoint, prompts, NUM_TOKENS, None)
    turn = BASE + answers[0] + REST
    answers += hf_greedy(checkpoint, [turn], NUM_TOKENS, None)
    return dict(zip([*PROMPTS, "next turn"], zip([*prompts, turn], answers, strict=True), strict=True))


ONE_BY_ONE = ["--max_seqs_per_batch=1", "--num_blocks=200"]
CASES = {
    "off": [*ONE_BY_ONE, "--enable_prefix_cache=false"],
    "one by one": ONE_BY_ONE,
    "native": [*ONE_BY_ONE, "--model_impl=native"],
    "two ranks": [*ONE_BY_ONE, "--tp_size=2"],
    # The longest sequence takes all pages; chunks end within pages.
    "few pages, chunks": ["--max_seqs_per_batch=1", "--num_blocks=18", "--max_tokens_per_batch=7"],
    "three at once": ["--max_seqs_per_batch=3", "--max_tokens_per_batch=64", "--python_graph_backend=recorded"],
}


def answer_all(worker: Worker, prompts: dict[str, list[int]]) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """(answers, stats) of prompts that all arrive at the same time."""
    worker.send({"command": "pause"})
    for name, prompt in prompts.items():
        worker.send({"id": name, "token_ids": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True})
    worker.send({"command": "resume"})
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    num_left = len(prompts)
    while num_left > 0:
        event = worker.read_event()
        assert "error" not in event, event
        answers[event["id"]] += event.get("token_ids", [])
        num_left -= bool(event.get("finished"))
    worker.send({"command": "stats"})
    return answers, worker.read_event()


@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_transformers_and_common_prefixes_are_hits(
    checkpoint: Path,
    worker_path: Path,
    expected: dict[str, tuple[list[int], list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flags = ["--device=cpu", "--dtype=float32", f"--block_size={PAGE}", "--max_model_len=128", *CASES[case]]
    with Worker([str(worker_path), f"--model={checkpoint}", *flags]) as worker:
        worker.ready()
        answers, stats = answer_all(worker, {name: prompt for name, (prompt, _) in expected.items()})
        assert worker.close() == 0
    assert answers == {name: answer for name, (_, answer) in expected.items()}

    scheduler = stats["scheduler"]
    counts = scheduler["prefix_cache"]
    num_prompt_tokens = sum(len(prompt) for prompt, _ in expected.values())
    num_hit = sum(hit for _, hit in PROMPTS.values()) + NEXT_TURN
    if case == "off":
        num_hit = 0
        assert counts == dict.fromkeys(counts, 0)
    elif case == "few pages, chunks":
        assert counts["num_evicted_blocks"] > 0
        assert 0 < counts["num_hit_tokens"] < num_hit
        num_hit = counts["num_hit_tokens"]
    elif case == "three at once":
        # The second begins in the step that computes the first, before anything is cached.
        num_hit -= PROMPTS["the same"][1]
        assert set(stats["executor"]["steps"]) == {"piecewise", "decode_graph"}
    elif case == "two ranks":
        assert stats["executor"]["tensor_parallel"]["num_tokens"] == scheduler["num_computed_tokens"]
    assert counts["num_hit_tokens"] == num_hit
    # The last token of an answer is no input.
    assert scheduler["num_computed_tokens"] == num_prompt_tokens + len(expected) * (NUM_TOKENS - 1) - num_hit
    assert scheduler["num_preemptions"] == 0
    assert scheduler["num_free_blocks"] == scheduler["num_blocks"]
