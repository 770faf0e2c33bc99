"""Native and Python model give equal bytes, on one rank and two, eagerly and with graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# mode: (flags of the Python model, flags of the native model, runners that are used)
MODES = {
    "eager": (["--python_graph_backend=off"], ["--enable_graph=false"], {"eager"}),
    "graphs": (["--python_graph_backend=recorded"], ["--enable_graph=true"], {"decode_graph", "piecewise"}),
}
LIMITS = ("--max_seqs_per_batch=8", "--max_tokens_per_batch=48", "--max_model_len=192", "--block_size=8")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_and_python_give_equal_bytes(
    checkpoint: Path, run_workload: Callable[..., Any], dtype: str, size: int, mode: str
) -> None:
    python_flags, native_flags, runners = MODES[mode]
    flags = (f"--dtype={dtype}", f"--tp_size={size}", *LIMITS)
    python = run_workload(checkpoint, *flags, *python_flags)
    native = run_workload(checkpoint, "--model_impl=native", *flags, *native_flags)
    assert native.ready == python.ready
    assert native.events == python.events

    answers = python.tokens()
    assert [len(answers[f"p{i}"]) for i in range(8)] == [64] * 8
    assert sum(len(tops) for tops in python.tops().values()) == sum(len(tokens) for tokens in answers.values())
    steps = python.stats["executor"]["steps"]
    assert set(steps) == runners
    assert native.stats["executor"]["steps"] == steps
    assert native.stats["scheduler"] == python.stats["scheduler"]
    for transcript in (python, native):
        others = transcript.stats["executor"].get("tensor_parallel", {}).get("other_ranks", [])
        assert [other["steps"] for other in others] == [steps] * (size - 1)


def test_prefix_cache_hits_give_equal_bytes(
    checkpoint: Path, run_workload: Callable[..., Any], workload: list[list[dict[str, Any]]]
) -> None:
    """Prompts that share pages with running and finished requests, on two ranks; tokens as without prefix cache."""
    long = workload[0][7]  # 50 tokens: six full pages and two tokens
    first = [
        long | {"id": f"first{i}", "token_ids": long["token_ids"][: 50 - 9 * i], "max_tokens": 20} for i in range(3)
    ]
    second = [message | {"id": message["id"].replace("first", "again"), "max_tokens": 9} for message in first]
    batches = [first, [*second, *workload[0][:4]]]
    flags = ("--dtype=float32", "--tp_size=2", *LIMITS)
    python_flags, native_flags, _ = MODES["graphs"]
    python = run_workload(checkpoint, *flags, *python_flags, batches=batches)
    native = run_workload(checkpoint, "--model_impl=native", *flags, *native_flags, batches=batches)
    assert native.events == python.events
    assert native.stats["scheduler"] == python.stats["scheduler"]
    assert native.stats["executor"]["steps"] == python.stats["executor"]["steps"]
    assert python.stats["scheduler"]["prefix_cache"]["num_hit_tokens"] == (40 + 24) + (48 + 40 + 24)
    off = run_workload(
        checkpoint, "--model_impl=native", *flags, *native_flags, "--enable_prefix_cache=false", batches=batches
    )
    assert off.stats["scheduler"]["prefix_cache"]["num_hit_tokens"] == 0
    assert off.tokens() == native.tokens()


def test_the_workload_has_mixed_and_decode_steps(checkpoint: Path, run_workload: Callable[..., Any]) -> None:
    """The workload has both mixed and pure decode steps, so the tests above compare all runners."""
    flags = ("--dtype=float32", "--tp_size=1", *LIMITS, "--python_graph_backend=recorded")
    transcript = run_workload(checkpoint, *flags)
    steps = transcript.stats["executor"]["steps"]
    assert steps["piecewise"] > 20
    assert steps["decode_graph"] > 60
    assert transcript.stats["scheduler"]["num_preemptions"] == 0
