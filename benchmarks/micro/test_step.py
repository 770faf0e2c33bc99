"""The Python twin of step_benchmark: a call with two tensors, and one that reads every core field of a step's metadata.

    python -m pytest benchmarks/micro --benchmark-only

Tensors and metadata are made anew before each round, outside of the timed part. Here the metadata is the reference
builder's, so the difference to the C++ program's figure is what the bridge adds: wrapping tensors and the view.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from xllm_metadata import FIELDS, Presence, build_attention_metadata

pytestmark = pytest.mark.filterwarnings("ignore::pytest_benchmark.logger.PytestBenchmarkWarning")

CORE = [field.name for field in FIELDS if field.presence is not Presence.OPTIONAL]
_READS = "\n    ".join(f"metadata.{name}" for name in CORE)
_NAMESPACE: dict[str, Any] = {}
exec(f"def execute(tokens, positions, metadata, indices):\n    {_READS}\n    return tokens\n", _NAMESPACE)


def baseline(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return tokens


def test_a_call_with_two_tensors(benchmark: Any) -> None:
    benchmark.pedantic(baseline, setup=lambda: ((torch.empty(8), torch.empty(8)), {}), rounds=2000, warmup_rounds=50)


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_a_step(benchmark: Any, kind: str) -> None:
    q_lens = [1, 1] if kind == "decode" else [1, 3]

    def setup() -> tuple[tuple[Any, ...], dict[str, Any]]:
        metadata = build_attention_metadata(q_lens, [5, 6], [[0, 1], [2, 3]], page_size=4)
        return (torch.empty(8), torch.empty(8), metadata, torch.empty(2)), {}

    benchmark.pedantic(_NAMESPACE["execute"], setup=setup, rounds=2000, warmup_rounds=50)
