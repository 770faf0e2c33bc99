"""Several ranks give the tokens of one rank, except for ties within the measured error. Also checks their traffic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LIMITS = ("--max_seqs_per_batch=8", "--max_tokens_per_batch=48", "--max_model_len=128", "--block_size=8")
RANK_LIMITS = ("--max_seqs_per_batch=8", "--max_tokens_per_batch=48", "--max_model_len=192", "--block_size=8")

# Allowed difference of a logit, since ranks sum in another order. Logits here are a few units: their rounding step is
# 2^-22 in fp32 and 2^-6 in bf16, and some dozen roundings add up.
TOLERANCE = {"float32": 5e-5, "bfloat16": 0.25}


def compare(one: Any, several: Any) -> tuple[float, list[str]]:
    """Compares answers up to their first different token.

    Returns the largest difference of a logit that both list, and a description of each divergence.
    """
    worst, divergences = 0.0, []
    tokens, others = one.tokens(), several.tokens()
    tops, other_tops = one.tops(), several.tops()
    for name in tokens:
        for i, (token, other) in enumerate(zip(tokens[name], others[name], strict=True)):
            mine, theirs = dict(map(tuple, tops[name][i])), dict(map(tuple, other_tops[name][i]))
            assert mine.keys() & theirs.keys()
            worst = max([worst, *(abs(mine[key] - theirs[key]) for key in mine.keys() & theirs.keys())])
            if token != other:
                values = [[value for _, value in top[name][i][:2]] for top in (tops, other_tops)]
                margins = [first - second for first, second in values]
                divergences.append(f"{name} at {i}: {token} or {other}, margins {margins[0]:.2g} and {margins[1]:.2g}")
                # Each token is among the other run's largest logits, and the two are a tie within the error.
                assert abs(mine[token] - mine[other]) <= 2 * worst
                break
    return worst, divergences


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_agree_with_one(
    checkpoint: Path, run_workload: Callable[..., Any], report: Callable[[str], None], dtype: str
) -> None:
    flags = (*RANK_LIMITS, "--python_graph_backend=off")
    one = run_workload(checkpoint, f"--dtype={dtype}", "--tp_size=1", *flags)
    two = run_workload(checkpoint, f"--dtype={dtype}", "--tp_size=2", *flags)
    worst, divergences = compare(one, two)
    num_tokens = sum(len(tokens) for tokens in one.tokens().values())
    report(
        f"{checkpoint.name} {dtype}, 2 ranks against 1: {num_tokens} tokens, logits within {worst:.2g} "
        f"(allowed {TOLERANCE[dtype]:g}), {len(divergences)} of {len(one.tokens())} answers diverge"
    )
    for divergence in divergences:
        report("    " + divergence)
    assert worst <= TOLERANCE[dtype]
    if dtype == "float32":
        assert not divergences


def test_eight_ranks_agree_with_one_and_send_what_the_formula_says(
    wide_checkpoint: Path, run_workload: Callable[..., Any], workload: list[list[dict[str, Any]]]
) -> None:
    """The formula of docs/tensor-parallel.md, with fp32, hidden 64, 2 layers and 259 tokens of vocabulary."""
    # First a prompt in chunks, whose steps compute no logits. They still run the all-gather.
    long = workload[0][0] | {"token_ids": list(range(3, 103)), "max_tokens": 2}
    batches = [[long], [message | {"max_tokens": 12} for message in workload[0]]]
    one = run_workload(wide_checkpoint, "--dtype=float32", *LIMITS, batches=batches)
    eight = run_workload(wide_checkpoint, "--dtype=float32", "--tp_size=8", *LIMITS, batches=batches)
    worst, divergences = compare(one, eight)
    assert worst <= TOLERANCE["float32"]
    assert not divergences
    stats = eight.stats["executor"]["tensor_parallel"]
    num_steps, num_tokens, num_logits = stats["num_steps"], stats["num_tokens"], stats["num_logits"]
    assert num_tokens == eight.stats["scheduler"]["num_computed_tokens"]
    assert num_logits == 2 + 8 * 12
    hidden_bytes, num_layers, columns = 64 * 4, 2, 33
    assert stats["traffic"] == {
        "all_reduce": {
            "calls": num_steps * (2 * num_layers + 1),
            "bytes": num_tokens * hidden_bytes * (2 * num_layers + 1),
        },
        "all_gather": {"calls": num_steps, "bytes": num_logits * columns * 4},
    }
    assert stats["bytes_per_layer_and_step"] == pytest.approx(2 * hidden_bytes * num_tokens / num_steps)


def test_native_ranks_send_the_same(checkpoint: Path, run_workload: Callable[..., Any]) -> None:
    flags = ("--dtype=float32", "--tp_size=2", *RANK_LIMITS)
    python = run_workload(checkpoint, *flags, "--python_graph_backend=off")
    native = run_workload(checkpoint, "--model_impl=native", *flags, "--enable_graph=false")
    python_stats, native_stats = (
        {key: value for key, value in run.stats["executor"]["tensor_parallel"].items() if key != "other_ranks"}
        for run in (python, native)
    )
    assert python_stats["traffic"]["all_reduce"]["bytes"] > 0
    assert native_stats == python_stats
