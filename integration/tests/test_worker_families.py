"""The worker on small random models of families with experts, states, sinks, other norms, or a vision tower.

Their tokens are those of transformers.

Prompts in chunks share steps with decodes, and the cache is too small for all requests, so that some are preempted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from worker_families import FAMILIES, save, serve

Events = list[dict[str, Any]]
Answers = Callable[[Events], dict[str, list[int]]]
HfGreedy = Callable[[Path, list[list[int]], int, int | None], list[list[int]]]

PROMPTS = [[5], [7, 8, 9], list(range(10, 27)), list(range(30, 80)), [3] * 100]
FLAGS = ["--dtype=float32", "--max_seqs_per_batch=5", "--max_tokens_per_batch=16", "--block_size=4", "--num_blocks=40"]


@pytest.fixture(scope="session", params=FAMILIES)
def checkpoint(
    request: pytest.FixtureRequest, small_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A small random model of each family, saved by transformers."""
    return save(request.param, small_config, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def hybrid(small_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with layers that keep a state per sequence."""
    return save("qwen3_next", small_config, tmp_path_factory.mktemp("hybrid"))


def test_tokens_equal_transformers(checkpoint: Path, hf_greedy: HfGreedy, worker_path: Path, answers: Answers) -> None:
    expected = hf_greedy(checkpoint, PROMPTS, 40, None)
    got, stats = serve([str(worker_path), f"--model={checkpoint}", "--device=cpu", *FLAGS], PROMPTS, answers)
    assert got == expected
    assert len({token for tokens in expected for token in tokens}) > 10
    assert stats["num_preemptions"] > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_20_requests_at_once_of_a_hybrid_model(
    ranks: int, hybrid: Path, hf_greedy: HfGreedy, worker_path: Path, answers: Answers
) -> None:
    """State slots are given, freed by preemption and given again; a prompt's chunks go on from their state."""
    rng = Random(3)
    prompts = [[rng.randrange(3, 250) for _ in range(rng.choice((1, 2, 7, 30, 60)))] for _ in range(20)]
    prompts[7] = prompts[3] + [9, 8]  # a common prefix, whose pages alone are no hit
    command = [str(worker_path), f"--model={hybrid}", "--device=cpu", "--dtype=float32", f"--tp_size={ranks}"]
    command += ["--max_seqs_per_batch=7", "--max_tokens_per_batch=24", "--block_size=4", "--num_blocks=60"]
    together, stats = serve(command, prompts, answers)
    assert stats["num_preemptions"] > 0
    assert together == hf_greedy(hybrid, prompts, 40, None)
    one_by_one, stats = serve(command, prompts, answers, together=False)
    assert one_by_one == together
    assert stats["num_preemptions"] == 0
