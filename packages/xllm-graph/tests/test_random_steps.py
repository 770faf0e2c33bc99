"""Any sequence of steps, drawn by hypothesis, runs under graphs as it does eagerly."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SETTINGS = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
# Per step, the number of tokens of each running request. 0 leaves a request out; an entry after the last one adds one.
STEPS = st.lists(st.lists(st.integers(0, 6), max_size=11), min_size=1, max_size=6)


@SETTINGS
@given(steps=STEPS, ends=st.sets(st.integers(0, 5)))
def check(harness: Any, steps: list[list[int]], ends: set[int]) -> None:
    harness.clear()
    requests: list[int] = []
    for index, counts in enumerate(steps):
        left, parts = harness.limits.max_num_tokens, []
        for index_in_step, count in enumerate(counts):
            if index_in_step == len(requests):
                requests.append(harness.add())
            number = requests[index_in_step]
            count = min(count, left, harness.limits.max_model_len - harness.length(number))
            if count:
                parts.append((number, count))
                left -= count
        harness.step(*parts)
        if index in ends and requests:
            harness.drop(requests.pop())


@pytest.mark.parametrize("logits_in_graph", [True, False])
def test_random_steps(make_setup: Any, logits_in_graph: bool) -> None:
    setup = make_setup(logits_in_graph=logits_in_graph)
    check(setup.harness)
    assert "eager" not in setup.runners.stats.steps
