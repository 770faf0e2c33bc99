"""The conformance suite over the toy model: decode graphs and piecewise graphs against eager execution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from xllm_graph.conformance import SCENARIOS, MixedWorkload, Scenario


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(make_setup: Callable[..., Any], scenario: Scenario) -> None:
    setup = make_setup()
    scenario(setup.harness)
    assert "eager" not in setup.runners.stats.steps
    assert not setup.runners.stats.misses


@pytest.mark.parametrize("scenario", SCENARIOS[-2:], ids=lambda scenario: scenario.__name__)
def test_scenario_with_the_head_outside_of_the_graph(make_setup: Callable[..., Any], scenario: Scenario) -> None:
    scenario(make_setup(logits_in_graph=False).harness)


def test_mixed_workload(make_setup: Callable[..., Any]) -> None:
    setup = make_setup()
    workload = MixedWorkload(setup.harness, num_requests=30, token_budget=24, max_prompt=16, max_answer=8)
    workload.run()
    assert workload.num_hits > 2
    steps = setup.runners.stats.steps
    assert set(steps) == {"decode_graph", "piecewise"}
    assert min(steps.values()) > 10
    assert setup.backend.plan_counts[0] >= sum(steps.values())


def test_one_plan_a_step(make_setup: Callable[..., Any]) -> None:
    setup = make_setup()
    before = setup.backend.plan_counts
    first, second = setup.harness.add(), setup.harness.add()
    setup.harness.step((first, 3), (second, 2))
    setup.harness.step((first, 1), (second, 1))
    assert setup.backend.plan_counts == tuple(count + 2 for count in before)


def test_poison_is_real(make_setup: Callable[..., Any]) -> None:
    """Outputs of an earlier step are gone after a later one, as in a shared pool."""
    setup = make_setup()
    request = setup.harness.add()
    setup.harness.step((request, 3))
    kept = setup.piecewise.padded_outputs()[0]
    before = kept.clone()
    setup.harness.step((request, 1))
    assert not torch.equal(kept, before)
