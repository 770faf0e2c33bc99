"""torch.compile over real model families: opaque ops, one compilation, equal to eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from xllm_executor import ModelExecutor
from xllm_graph.conformance import SCENARIOS
from xllm_metadata import allocate_caches

MakeSetup = Callable[..., Any]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_every_scenario_with_one_compilation(make_setup: MakeSetup, family: str) -> None:
    setup = make_setup(family, python_graph_backend="aot_eager")
    for scenario in SCENARIOS:
        scenario(setup.harness)
        setup.harness.clear()
    stats = setup.executor.stats()
    assert set(stats["steps"]) == {"compiled"}
    assert [graph["num_graphs"] for graph in stats["graphs"]] == [1]


def test_passes_see_the_models_ops(make_model: Any) -> None:
    """Attention and the other ops are single nodes of the graph that a pass gets, as torch calls them."""
    model = make_model("llama")
    seen: set[str] = set()

    def look(module: torch.fx.GraphModule) -> None:
        seen.update(str(node.target) for node in module.graph.nodes if node.op == "call_function")

    executor = ModelExecutor(
        model, {"python_graph_backend": "eager", "max_tokens_per_batch": 16}, 4, graph_passes=[look]
    )
    executor.bind_kv_caches(allocate_caches(model.cache_specs, num_pages=8, page_size=4))
    executor.warmup()
    assert any("xllm.attention" in target for target in seen)
    assert any("xllm.rotary" in target or "norm_rotary" in target for target in seen)
    assert not any("scaled_dot_product" in target for target in seen)
