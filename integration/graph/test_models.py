"""Conformance suite of graph execution, on real model families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from xllm_graph.conformance import SCENARIOS, Limits, MixedWorkload, Scenario

MakeSetup = Callable[..., Any]
BY_NAME: dict[str, Scenario] = {scenario.__name__: scenario for scenario in SCENARIOS}  # type: ignore[attr-defined]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(make_setup: MakeSetup, family: str, scenario: Scenario) -> None:
    setup = make_setup(family)
    scenario(setup.harness)
    stats = setup.executor.stats()
    assert stats["steps"]
    assert set(stats["steps"]) <= {"decode_graph", "piecewise"}
    assert stats["graph_misses"] == {}


@pytest.mark.parametrize(
    ("other", "num_groups"),
    [
        ("mistral", 1),
        ("gemma3_text", 2),
        ("qwen3_moe", 1),
        ("mixtral", 1),
        ("olmo2", 1),
        ("glm4", 1),
        ("glm4_moe", 1),
        ("qwen3_next", 1),
        ("gpt_oss", 2),
    ],
)
def test_other_families(make_setup: MakeSetup, other: str, num_groups: int) -> None:
    """Sliding windows, several attention groups with a plan each, experts that are selected on the device, states."""
    setup = make_setup(other)
    for name in ("shrinking_batches", "other_lengths", "kinds_in_turn"):
        BY_NAME[name](setup.harness)
        setup.harness.clear()
    stats = setup.executor.stats()
    assert set(stats["steps"]) == {"decode_graph", "piecewise"}
    assert stats["plans"] == [sum(stats["steps"].values())] * num_groups


def test_every_step_piecewise(make_setup: MakeSetup, family: str) -> None:
    setup = make_setup(family, python_graph_backend="piecewise")
    for scenario in SCENARIOS:
        scenario(setup.harness)
        setup.harness.clear()
    assert set(setup.executor.stats()["steps"]) == {"piecewise"}


def test_mixed_workload_of_200_requests(make_setup: MakeSetup) -> None:
    """Chunked prefill, decode and prefix hits: every step after warm-up runs under a graph, and equals eager."""
    limits = Limits(max_num_seqs=24, max_num_tokens=64, max_model_len=64, page_size=8, num_pages=24 * 8, vocab_size=131)
    setup = make_setup("qwen3", limits=limits)
    workload = MixedWorkload(setup.harness, num_requests=200, token_budget=64, max_prompt=48, max_answer=16)
    workload.run()
    stats = setup.executor.stats()
    assert workload.num_hits >= 10
    assert sum(stats["steps"].values()) == workload.num_steps
    assert set(stats["steps"]) == {"decode_graph", "piecewise"}
    assert min(stats["steps"].values()) >= 20
    assert stats["eager_reasons"] == {}
    assert stats["graph_misses"] == {}
    assert stats["plans"] == [workload.num_steps]


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # the interpreter, over poisoned pages
@pytest.mark.parametrize("scenario", [BY_NAME["mixed_orders"], BY_NAME["selected_logits"]], ids=["mixed", "selected"])
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_triton_kernels_in_recorded_graphs(make_interpreted_setup: MakeSetup, family: str, scenario: Scenario) -> None:
    """Launches are recorded like ops, in the interpreter."""
    limits = Limits(max_num_seqs=4, max_num_tokens=16, max_model_len=16, page_size=4, num_pages=32, vocab_size=131)
    setup = make_interpreted_setup(family, limits=limits, changes={"num_hidden_layers": 1})
    scenario(setup.harness)
    assert set(setup.executor.stats()["steps"]) == {"decode_graph", "piecewise"}


@pytest.mark.parametrize("live", [96, 97, 100])
def test_a_limit_of_100_sequences(make_setup: MakeSetup, live: int) -> None:
    """A batch between the last two buckets: buffers cover the padded rows, not the live ones only."""
    limits = Limits(max_num_seqs=100, max_num_tokens=100, max_model_len=8, page_size=4, num_pages=200, vocab_size=131)
    setup = make_setup("llama", limits=limits)
    requests = [setup.harness.add() for _ in range(live)]
    setup.harness.step(*((number, 1) for number in requests))
    setup.harness.step(*((number, 1) for number in requests))
    setup.harness.step(*((number, 1) for number in requests[:3]))
    assert setup.executor.stats()["steps"] == {"decode_graph": 3}


def test_long_context_after_a_capture_at_none(make_setup: MakeSetup) -> None:
    """A replay uses the plan of its step: thousands of tokens, where the capture had none."""
    limits = Limits(max_num_seqs=2, max_num_tokens=256, max_model_len=2100, page_size=64, num_pages=80, vocab_size=131)
    changes = {"max_position_embeddings": 4096}
    setup = make_setup("llama", limits=limits, changes=changes, graph_token_budget=limits.max_num_tokens)
    long, short = setup.harness.add(), setup.harness.add()
    for _ in range(8):
        setup.harness.step((long, 256))
    setup.harness.step((short, 1), (long, 1))
    setup.harness.step((long, 1), (short, 1))
    assert setup.executor.stats()["steps"] == {"piecewise": 8, "decode_graph": 2}


@pytest.mark.parametrize("orders", [((0, 1, 2, 3), (3, 2, 1, 0)), ((0, 1, 2, 3), (2, 0, 3, 1))])
def test_any_order_gives_each_request_the_same(make_setup: MakeSetup, family: str, orders: Any) -> None:
    results = []
    for order in orders:
        harness = make_setup(family).harness
        requests = [harness.add() for _ in range(4)]
        for number in requests[:2]:
            harness.step((number, 5))
        counts = (1, 1, 7, 3)  # two decode, two prompts
        logits = harness.step(*((requests[i], counts[i]) for i in order))
        results.append(torch.stack([logits[order.index(i)] for i in range(4)]))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_weights_loaded_again_are_what_graphs_use(make_setup: MakeSetup, family: str) -> None:
    setup = make_setup(family)
    first = setup.harness.add()
    before = setup.harness.step((first, 4)).clone()
    weights = {name: tensor * 1.5 for name, tensor in setup.model.state_dict().items() if "norm" in name}
    setup.model.load_state_dict(weights, strict=False)
    second = setup.harness.copy(first)
    after = setup.harness.step((second, 4))
    assert not torch.allclose(before, after)
    setup.harness.step((second, 1), (first, 1))


@pytest.mark.parametrize("logits_in_graph", [True, False])
def test_where_the_head_runs(make_setup: MakeSetup, family: str, logits_in_graph: bool) -> None:
    setup = make_setup(family, logits_in_graph=logits_in_graph)
    for scenario in SCENARIOS[-5:]:
        scenario(setup.harness)
        setup.harness.clear()


def test_custom_buckets(make_setup: MakeSetup, family: str) -> None:
    setup = make_setup(family, graph_buckets="3,5,11")
    for scenario in SCENARIOS[:2]:
        scenario(setup.harness)
        setup.harness.clear()
    sizes = [graph["size"] for graph in setup.executor.stats()["graphs"] if graph["runner"] == "decode_graph"]
    assert sizes == [11, 5, 3]
