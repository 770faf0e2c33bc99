"""EagerRunner: plans once, runs the two callables in the backend's context, returns logits or hidden states."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from xllm_attention import AttentionBackend, AttentionSpec, BackendLimits, create_backend, current_backend
from xllm_graph import EagerReason, EagerRunner, ModelCalls, StepStats
from xllm_metadata import LayerCache, build_attention_metadata

STEP = build_attention_metadata([2, 1], [2, 1], [[0], [1]], page_size=4)
TOKENS = torch.tensor([4, 5, 6], dtype=torch.int32)
NO_CONTEXT = "outside of a forward context"


@pytest.fixture
def backend() -> AttentionBackend:
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0)
    limits = BackendLimits(
        device=torch.device("cpu"), dtype=torch.float32, max_num_seqs=4, max_num_tokens=8, max_model_len=16
    )
    backend = create_backend("torch", [spec], limits)
    backend.bind_kv_caches([LayerCache(k=torch.zeros(4, 4, 1, 8), v=torch.zeros(4, 4, 1, 8))])
    return backend


def test_the_callables_run_inside_the_context_after_one_plan(backend: AttentionBackend) -> None:
    seen = []
    weight = torch.ones(1, requires_grad=True)

    def forward(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        seen.append((current_backend() is backend, backend.plan_counts))
        return tokens[:, None] * weight

    def compute_logits(hidden: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
        return hidden if indices is None else hidden[indices]

    runner = EagerRunner(ModelCalls(forward=forward, compute_logits=compute_logits, backend=backend))
    hidden = runner.execute(TOKENS, TOKENS, STEP, None)
    assert hidden.tolist() == [[4.0], [5.0], [6.0]]
    assert not hidden.requires_grad
    assert runner.execute(TOKENS, TOKENS, STEP, torch.tensor([1])).tolist() == [[5.0]]
    assert seen == [(True, (1,)), (True, (2,))]
    with pytest.raises(RuntimeError, match=NO_CONTEXT):
        current_backend()


def test_a_failing_model_leaves_no_context_behind(backend: AttentionBackend) -> None:
    def forward(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise KeyError("fault")

    runner = EagerRunner(ModelCalls(forward=forward, compute_logits=lambda hidden, indices: hidden, backend=backend))
    with pytest.raises(KeyError, match="fault"):
        runner.execute(TOKENS, TOKENS, STEP, None)
    with pytest.raises(RuntimeError, match=NO_CONTEXT):
        current_backend()


def test_every_eager_step_has_a_reason() -> None:
    stats = StepStats()
    stats.count("eager", EagerReason.GRAPHS_OFF)
    stats.count("decode_graph")
    assert stats.steps == {"eager": 1, "decode_graph": 1}
    assert stats.eager_reasons == {"graphs_off": 1}


def test_the_readme_example_runs() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(example, namespace)
    assert namespace["logits"].shape == (1, 10)
    assert namespace["runners"].stats.steps == {"piecewise": 1}
