"""Tensor parallelism over gloo: several ranks give the logits of HF transformers, and all ranks the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from xllm_models import TensorParallel, get_model_class
from xllm_models.layers import QKVLinear, Segment

TOLERANCE = 1e-4

# Vocabularies (97, 98, 99) that neither 2 nor 4 ranks divide; kv heads fewer than the ranks.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied multi-query": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "vocab_size": 98}),
    "llama multi-head": ("llama", {"num_key_value_heads": 4, "vocab_size": 99}),
    "qwen3 biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3 tied window": (
        "qwen3",
        {
            "head_dim": 8,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
}


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_give_the_logits_of_hf(
    size: int, write_checkpoint: Callable[..., Any], hf_logits: Callable[..., list[torch.Tensor]], tmp_path: Path
) -> None:
    written = [write_checkpoint(model_type, seed=11, **config) for model_type, config in CASES.values()]
    script = Path(__file__).parents[1] / "tensor_parallel_rank.py"
    outputs = [tmp_path / f"rank{rank}.pt" for rank in range(size)]
    directories = [str(directory) for _, directory in written]
    logs = [tmp_path / f"rank{rank}.log" for rank in range(size)]
    processes = []
    for rank, (output, log) in enumerate(zip(outputs, logs, strict=True)):
        arguments = [script, rank, size, tmp_path / "rendezvous", output, *directories]
        command = [sys.executable, *map(str, arguments)]
        with log.open("w") as stream:
            processes.append(subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT))
    try:
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(timeout=120) == 0, log.read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    per_rank = [torch.load(output) for output in outputs]
    for case, (hf, _) in enumerate(written):
        want = hf_logits(hf)
        for first, *others in zip(*(results[case] for results in per_rank), strict=True):
            sequence, start, logits = first
            expected = want[sequence][start : start + len(logits)]
            assert logits.shape == expected.shape
            assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()
            assert all(torch.equal(logits, other) for _, _, other in others)


@pytest.mark.parametrize(
    ("num_kv_heads", "size", "want"),
    [
        (8, 2, [(0, 4), (4, 4)]),
        (2, 2, [(0, 1), (1, 1)]),
        (2, 4, [(0, 1), (0, 1), (1, 1), (1, 1)]),
        (1, 3, [(0, 1)] * 3),
    ],
)
def test_kv_heads_are_cut_or_replicated(num_kv_heads: int, size: int, want: list[tuple[int, int]]) -> None:
    got = [
        TensorParallel(rank=rank, size=size).cut_or_replicate("num_key_value_heads", num_kv_heads)
        for rank in range(size)
    ]
    assert got == [Segment(total=num_kv_heads, start=start, count=count) for start, count in want]


@pytest.mark.parametrize(("total", "size"), [(97, 2), (97, 4), (3, 4), (5, 4), (8, 4), (1, 3)])
def test_a_padded_vocabulary_covers_every_row_once(total: int, size: int) -> None:
    cuts = [TensorParallel(rank=rank, size=size).cut_padded(total) for rank in range(size)]
    assert len({held for _, held in cuts}) == 1
    assert cuts[0][1] * size - total < size
    rows = [row for segment, _ in cuts for row in range(segment.start, segment.start + segment.count)]
    assert rows == list(range(total))
    assert all(0 <= segment.count <= held for segment, held in cuts)


def test_shapes_that_the_ranks_cannot_share_are_named() -> None:
    three = TensorParallel(rank=0, size=3)
    with pytest.raises(ValueError, match="num_attention_heads 4 is not divisible by tp_size 3"):
        QKVLinear(8, 4, 3, 4, tp=three)
    with pytest.raises(ValueError, match="num_key_value_heads 4 is not divisible by tp_size 3"):
        QKVLinear(8, 12, 4, 4, tp=three)
    with pytest.raises(ValueError, match="tp_size 3 is not a multiple of num_key_value_heads 2"):
        QKVLinear(8, 6, 2, 4, tp=three)
    config = {
        "model_type": "llama",
        "vocab_size": 5,
        "hidden_size": 6,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "max_position_embeddings": 4,
    }
    with pytest.raises(ValueError, match="intermediate_size 8 is not divisible by tp_size 3"):
        get_model_class("llama")(config, tp=three)
