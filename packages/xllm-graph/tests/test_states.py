"""A model with a state per sequence under graphs: every scenario passes, and planted faults of the state are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from xllm_attention import StateLayer, StateSpec, StateStep
from xllm_attention.state import read_states, write_states
from xllm_graph.conformance import SCENARIOS, Check, ConformanceError, MixedWorkload, Scenario
from xllm_metadata import CacheSpec, LayerCache

MakeSetup = Callable[..., Any]
BY_NAME: dict[str, Scenario] = {scenario.__name__: scenario for scenario in SCENARIOS}  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningMean(StateSpec):
    """out_t = s_t = s_{t-1} / 2 + x_t / 2, with a fault where one is named."""

    size: int
    fault: str = ""

    def cache_specs(self, dtype: torch.dtype) -> tuple[CacheSpec, ...]:
        return (CacheSpec("ssm", (self.size,), dtype),)

    def run(self, step: StateStep, cache: LayerCache, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        (x,) = inputs
        assert cache.ssm is not None
        states = read_states(cache.ssm, step)
        if self.fault == "reads a slot without a state":
            states = cache.ssm.index_select(0, step.read_slots.clamp_min(0))
        if step.decode:
            states = (states + x[: states.shape[0]]) / 2
            out[: states.shape[0]] = states
            out[states.shape[0] :].zero_()
        else:
            out.zero_()
            rows = list(states)
            for i, (start, stop) in enumerate(pairwise(step.bounds)):
                for row in range(start, stop):
                    rows[i] = out[row] = (rows[i] + x[row]) / 2
            if rows:
                states = torch.stack(rows)
        if step.decode and self.fault == "padding writes slot 0":
            cache.ssm.index_copy_(0, step.write_slots.clamp_min(0).long(), states)
        elif step.decode and self.fault == "writes the read slot's neighbour":
            write_states(cache.ssm, step._replace(write_slots=step.write_slots ^ 1), states)
        else:
            write_states(cache.ssm, step, states)


@pytest.fixture
def make_hybrid(make_setup: MakeSetup, make_toy_model: Callable[[], nn.Module]) -> MakeSetup:
    """Makes a setup of the toy model with a layer that keeps a state, between its attention layers and its head."""

    def make(fault: str = "") -> Any:
        model = make_toy_model()
        state = StateLayer(RunningMean(size=32, fault=fault), len(model.attn))
        forward = model.forward
        model.state = state

        def with_state(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            hidden = forward(tokens, positions)
            return hidden + state([hidden], (32,))

        model.forward = with_state
        return make_setup(model=model)

    return make


def test_every_scenario(make_hybrid: MakeSetup) -> None:
    setup = make_hybrid()
    for scenario in SCENARIOS:
        scenario(setup.harness)
        setup.harness.clear()
    assert {"decode_graph", "piecewise"} <= set(setup.runners.stats.steps)


def test_a_random_workload(make_hybrid: MakeSetup) -> None:
    setup = make_hybrid()
    MixedWorkload(setup.harness, num_requests=40, token_budget=24, max_prompt=14, max_answer=8).run()


def test_a_piecewise_graph_ends_at_a_layer_with_state(make_hybrid: MakeSetup, make_setup: MakeSetup) -> None:
    setup = make_hybrid()
    plain = make_setup()
    pieces, fewer = ([report.num_graphs for report in one.piecewise.reports] for one in (setup, plain))
    assert pieces == [count + 1 for count in fewer]


@pytest.mark.parametrize(
    ("fault", "scenario", "check"),
    [
        ("reads a slot without a state", "mixed_orders", Check.LOGITS),
        ("padding writes slot 0", "every_live_size", Check.CACHE_UNTOUCHED),
        ("writes the read slot's neighbour", "other_lengths", Check.CACHE_CONTENTS),
    ],
)
def test_planted_faults_are_found(make_hybrid: MakeSetup, fault: str, scenario: str, check: Check) -> None:
    setup = make_hybrid(fault)
    with pytest.raises(ConformanceError) as caught:
        BY_NAME[scenario](setup.harness)
    assert caught.value.check is check
