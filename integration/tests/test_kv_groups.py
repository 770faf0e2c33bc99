"""The worker frees the pages that have left a sliding window: the same tokens, from a bounded number of pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from worker_families import save
from worker_families import serve as serve_prompts

Events = list[dict[str, Any]]
Answers = Callable[[Events], dict[str, list[int]]]
HfGreedy = Callable[[Path, list[list[int]], int, int | None], list[list[int]]]

PAGE_SIZE, WINDOW, MAX_TOKENS, MAX_SEQS = 4, 24, 24, 6
FLAGS = [
    "--device=cpu", "--dtype=float32", f"--max_seqs_per_batch={MAX_SEQS}", f"--max_tokens_per_batch={MAX_TOKENS}",
    f"--block_size={PAGE_SIZE}",
]  # fmt: skip
PAGES_OF_WINDOW = (WINDOW + PAGE_SIZE - 2) // PAGE_SIZE + 1  # most pages that so many consecutive tokens touch
FAMILIES = ("gemma3", "gpt_oss", "mixtral")  # every layer of Mixtral has the window


@pytest.fixture(scope="session", params=FAMILIES)
def windowed(
    request: pytest.FixtureRequest, small_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A small random model with sliding-window layers."""
    return save(request.param, small_config, tmp_path_factory.mktemp(f"windowed_{request.param}"))


@pytest.fixture(scope="session")
def gemma(small_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Gemma 3."""
    return save("gemma3", small_config, tmp_path_factory.mktemp("windowed_gemma"))


def prompts() -> list[list[int]]:
    """20 prompts of up to five windows; one begins with another one."""
    rng = Random(5)
    made = [[rng.randrange(3, 250) for _ in range(rng.choice((1, 7, 30, 60, 120)))] for _ in range(20)]
    made[7] = [*made[3], 9, 8]
    return made


def command(worker: Path, model: Path, *flags: str) -> list[str]:
    return [str(worker), f"--model={model}", *FLAGS, *flags]


def test_tokens_are_those_of_one_table_and_of_transformers(
    windowed: Path, hf_greedy: HfGreedy, worker_path: Path, answers: Answers
) -> None:
    """With enough pages for all: each sequence holds its window's pages, and those of its chunk."""
    expected = hf_greedy(windowed, prompts(), 40, None)
    grouped = command(worker_path, windowed, "--num_blocks=240", "--enable_kv_groups")
    got, stats = serve_prompts(grouped, prompts(), answers)
    assert got == expected
    one_table = command(worker_path, windowed, "--num_blocks=240")
    without, stats_without = serve_prompts(one_table, prompts(), answers)
    assert without == expected
    assert stats_without["kv_groups"] == []
    (group,) = stats["kv_groups"]
    assert group["window"] == WINDOW
    assert PAGES_OF_WINDOW < group["peak_used_blocks"] <= MAX_SEQS * PAGES_OF_WINDOW + MAX_TOKENS // PAGE_SIZE
    assert group["num_used_blocks"] == 0
    assert stats["prefix_cache"]["num_hit_tokens"] == 0


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("graph", ["off", "recorded"])
def test_preemption_chunks_ranks_and_graphs(
    graph: str, ranks: int, gemma: Path, hf_greedy: HfGreedy, worker_path: Path, answers: Answers
) -> None:
    flags = [f"--tp_size={ranks}", f"--python_graph_backend={graph}", "--num_blocks=60", "--enable_kv_groups"]
    got, stats = serve_prompts(command(worker_path, gemma, "--max_model_len=192", *flags), prompts(), answers)
    assert got == hf_greedy(gemma, prompts(), 40, None)
    assert stats["num_preemptions"] > 0
    (group,) = stats["kv_groups"]
    assert group["peak_used_blocks"] <= min(60, MAX_SEQS * PAGES_OF_WINDOW + MAX_TOKENS // PAGE_SIZE)
    assert group["num_used_blocks"] == 0


def test_a_decoding_sequence_holds_its_window_s_pages(gemma: Path, worker_path: Path, answers: Answers) -> None:
    """A prompt of one token, and 150 generated: chunks play no part in the peak."""
    worker = command(worker_path, gemma, "--num_blocks=60", "--enable_kv_groups")
    _, stats = serve_prompts(worker, [[5]] * 2, answers, num_tokens=150)
    (group,) = stats["kv_groups"]
    assert group["peak_used_blocks"] == 2 * PAGES_OF_WINDOW


def test_too_few_pages_of_the_window_cause_preemptions_only(
    gemma: Path, hf_greedy: HfGreedy, worker_path: Path, answers: Answers
) -> None:
    """The window's pages run out first: memory for two sequences, split between both groups."""
    worker = command(worker_path, gemma, "--kv_cache_memory=96KiB", "--enable_kv_groups")
    got, stats = serve_prompts(worker, prompts(), answers)
    assert got == hf_greedy(gemma, prompts(), 40, None)
    (group,) = stats["kv_groups"]
    assert stats["num_preemptions"] > 0
    assert group["peak_used_blocks"] <= group["num_blocks"] < MAX_SEQS * PAGES_OF_WINDOW


def test_a_model_without_windows_ignores_the_option(llama: Path, worker_path: Path, answers: Answers) -> None:
    worker = command(worker_path, llama, "--num_blocks=60")
    plain, _ = serve_prompts(worker, prompts()[:3] * 2, answers)
    got, stats = serve_prompts([*worker, "--enable_kv_groups"], prompts()[:3] * 2, answers)
    assert got == plain
    assert stats["kv_groups"] == []


def test_the_prefix_cache_is_off_with_a_line_in_the_log(gemma: Path, run: Callable[..., Any]) -> None:
    result = run(gemma, [], "--num_blocks=60", "--enable_kv_groups")
    assert result.returncode == 0
    assert (
        "the prefix cache is off: --enable_kv_groups frees the pages that have left a sliding window" in result.stderr
    )
    assert "prefix cache" not in run(gemma, [], "--num_blocks=60").stderr
