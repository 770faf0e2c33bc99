"""The arithmetic of tensor parallelism, and its errors. What the ranks compute together is compared in test_parity."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from xllm_models import TensorParallel, get_model_class, load_model
from xllm_models.layers import QKVParallelLinear, Shard


def test_a_model_of_several_ranks_needs_a_registered_group(
    write_checkpoint: Callable[..., Any], paged: ModuleType
) -> None:
    model = load_model(write_checkpoint("llama")[1], tp_rank=0, tp_size=2)
    with pytest.raises(RuntimeError, match="no process group named 'tp'"):
        list(paged.run_steps(model))


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
        TensorParallel(rank=rank, size=size).shard_or_replicate("num_key_value_heads", num_kv_heads)
        for rank in range(size)
    ]
    assert got == [Shard(total=num_kv_heads, start=start, size=count) for start, count in want]


@pytest.mark.parametrize(("total", "size"), [(97, 2), (97, 4), (3, 4), (5, 4), (8, 4), (1, 3)])
def test_a_padded_vocabulary_covers_every_row_once(total: int, size: int) -> None:
    cuts = [TensorParallel(rank=rank, size=size).shard_padded(total) for rank in range(size)]
    assert len({held for _, held in cuts}) == 1
    assert cuts[0][1] * size - total < size
    rows = [row for shard, _ in cuts for row in range(shard.start, shard.start + shard.size)]
    assert rows == list(range(total))
    assert all(0 <= shard.size <= held for shard, held in cuts)


def test_shapes_that_the_ranks_cannot_share_are_named() -> None:
    three = TensorParallel(rank=0, size=3)
    with pytest.raises(ValueError, match="num_attention_heads 4 is not divisible by tp_size 3"):
        QKVParallelLinear(8, 4, 4, 3, tp=three)
    with pytest.raises(ValueError, match="num_key_value_heads 4 is not divisible by tp_size 3"):
        QKVParallelLinear(8, 4, 12, 4, tp=three)
    with pytest.raises(ValueError, match="tp_size 3 is not a multiple of num_key_value_heads 2"):
        QKVParallelLinear(8, 4, 6, 2, tp=three)
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
