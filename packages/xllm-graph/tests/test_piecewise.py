"""PiecewiseGraphRunner: cuts, results of ops between graphs, and refused steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from xllm_attention.op_library import define_op
from xllm_graph import PiecewiseGraphRunner

_LIBRARY = torch.library.Library("xllm_graph_test", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("shifted(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.define("doubled_(Tensor(a!) x) -> ()")  # type: ignore[no-untyped-call]


def _shifted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _doubled(x: torch.Tensor) -> None:
    x.mul_(2)


_LIBRARY.impl("shifted", _shifted, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("doubled_", _doubled, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


@define_op(mutates=["x"], collective=True)
def _graph_test_exchange_(x: torch.Tensor) -> None:
    x.add_(1)


def with_ops(model: Any) -> None:
    forward = type(model).forward

    def changed(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = torch.ops.xllm_graph_test.shifted(forward(model, tokens, positions))
        torch.ops.xllm_graph_test.doubled_(hidden)
        return hidden - 1

    model.forward = changed


@pytest.mark.parametrize("cut", [(), ("xllm_graph_test::shifted",), ("xllm_graph_test::doubled_",)])
def test_extra_ops_run_between_graphs(make_setup: Callable[..., Any], cut: tuple[str, ...]) -> None:
    setup = make_setup(warm=False, cut_ops=cut)
    with_ops(setup.model)
    setup.runners.warmup()
    assert {report.num_graphs for report in setup.piecewise.reports} == {3 + len(cut)}
    first = setup.harness.add()
    setup.harness.step((first, 5))
    setup.harness.step((first, 4), (setup.harness.add(), 3))


@pytest.mark.parametrize("cut", [False, True])
def test_a_collective_runs_between_graphs_without_being_listed(make_setup: Callable[..., Any], cut: bool) -> None:
    setup = make_setup(warm=False, cut_collectives=cut)
    forward = setup.model.forward

    def changed(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = forward(tokens, positions) * 2
        _graph_test_exchange_(hidden)
        return hidden - 1

    setup.model.forward = changed
    setup.runners.warmup()
    assert {report.num_graphs for report in setup.piecewise.reports} == {3 + cut}
    setup.harness.step((setup.harness.add(), 5))


def test_results_of_ops_between_graphs_outlive_inference_mode(make_setup: Callable[..., Any]) -> None:
    setup = make_setup(warm=False, cut_ops=("xllm_graph_test::shifted",))
    with_ops(setup.model)
    with torch.inference_mode():
        setup.runners.warmup()
    setup.harness.step((setup.harness.add(), 5))


def test_a_name_that_is_no_op_is_refused(make_setup: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="cut_ops has 'xllm::no_such'; no such op is registered"):
        make_setup(cut_ops=("xllm::no_such",))


def test_limits_and_order(make_setup: Callable[..., Any]) -> None:
    setup = make_setup(warm=False)
    metadata, tokens, positions = setup.harness._build([(setup.harness.add(), 3)])
    for runner in (setup.piecewise, setup.decode):
        with pytest.raises(RuntimeError, match="execute was called before warmup"):
            runner.execute(tokens, positions, metadata, None)
    setup.runners.warmup()
    with pytest.raises(RuntimeError, match="graphs are captured once"):
        setup.runners.warmup()
    other, _, _ = setup.harness._build([(setup.harness.add(), 2)])
    with pytest.raises(ValueError, match="3 tokens; the metadata has slots for 2"):
        setup.piecewise.execute(tokens, positions, other, None)
    many = torch.zeros(65, dtype=torch.int32)
    with pytest.raises(ValueError, match="65 tokens exceed the largest graph bucket 32"):
        setup.piecewise.execute(many, many, metadata, None)
    with pytest.raises(ValueError, match="batch size 65 exceeds the largest graph bucket 16"):
        setup.decode.execute(many, many, metadata, None)
    with pytest.raises(ValueError, match="largest graph bucket 64 exceeds the backend's max_num_tokens 32"):
        PiecewiseGraphRunner(setup.calls, setup.runtime, buckets=(64,))
