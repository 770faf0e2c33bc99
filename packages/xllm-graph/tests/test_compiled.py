"""CompiledRunner: equal to eager, compiled once, and never again from any thread."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from xllm_attention import Phase
from xllm_graph import CompiledRunner, EagerReason, ModelCalls, RunnerSet
from xllm_graph.conformance import SCENARIOS, Check, ConformanceError, Limits, Scenario

MakeSetup = Callable[..., Any]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(setup: Any, compiler: str, **options: Any) -> CompiledRunner:
    """Puts a compiled runner in front of the setup's eager one."""
    runner = CompiledRunner(setup.calls, compiler=compiler, **options)
    setup.harness.runners = RunnerSet(setup.runners.eager, [runner], eager_is_error=True)
    setup.harness._execute = setup.harness.runners.execute
    setup.harness.runners.warmup()
    return runner


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_all_scenarios_with_one_compilation(make_setup: MakeSetup, compiler: str) -> None:
    setup = make_setup(warm=False)
    runner = compiled(setup, compiler)
    for scenario in SCENARIOS:
        scenario(setup.harness)
        setup.harness.clear()
    assert runner.num_compilations == 1
    assert set(setup.harness.runners.stats.steps) == {"compiled"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own modules
@pytest.mark.filterwarnings("ignore:TensorFloat32")  # its advice
def test_inductor(make_setup: MakeSetup) -> None:
    setup = make_setup(warm=False)
    runner = compiled(setup, "inductor")
    SCENARIOS[-1](setup.harness)
    assert runner.num_compilations == 1


def test_no_compilation_in_another_thread(make_setup: MakeSetup) -> None:
    """A new thread has a grad mode and a number of threads of its own."""
    setup = make_setup(warm=False)
    runner = compiled(setup, "eager")

    def step() -> None:
        torch.set_num_threads(2)
        setup.harness.step((setup.harness.add(), 5))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(step).result()
    assert runner.num_compilations == 1


def test_a_runner_made_and_warmed_up_in_inference_mode_serves_outside(make_setup: MakeSetup) -> None:
    setup = make_setup(warm=False)
    with torch.inference_mode():
        compiled(setup, "eager")
    for count in (5, 1):
        setup.harness.step((setup.harness.add(), count))


def test_steps_in_inference_mode(make_setup: MakeSetup) -> None:
    setup = make_setup(warm=False)
    compiled(setup, "eager")
    with torch.inference_mode():
        for count in (5, 1):
            setup.harness.step((setup.harness.add(), count))


@pytest.mark.parametrize(("max_num_tokens", "max_model_len"), [(1, 4), (4, 1)])
def test_steps_of_one_token_at_most(make_setup: MakeSetup, max_num_tokens: int, max_model_len: int) -> None:
    """Then every step is padded to two tokens, in warm-up too."""
    limits = Limits(
        max_num_seqs=1, max_num_tokens=max_num_tokens, max_model_len=max_model_len, page_size=4, num_pages=8,
        vocab_size=50,
    )  # fmt: skip
    setup = make_setup(warm=False, limits=limits)
    compiled(setup, "eager")
    setup.harness.step((setup.harness.add(), 1))
    setup.harness.step()


def test_release_drops_what_was_compiled(make_setup: MakeSetup) -> None:
    """torch.compile keeps references until process exit: none may lead to the model or its caches."""
    setup = make_setup(warm=False)
    model = type(setup.model)().to(setup.backend.limits.device)
    calls = ModelCalls(forward=model, compute_logits=model.compute_logits, backend=setup.backend)
    runner = CompiledRunner(calls, compiler="eager")
    runner.warmup()
    runner.release()
    assert runner.refusal(Phase.DECODE, 1) is EagerReason.NOT_WARMED_UP
    runner.warmup()
    assert runner.num_compilations == 1
    runner.release()
    alive = [weakref.ref(runner), weakref.ref(model)]
    del runner, model, calls
    gc.collect()
    assert [one() for one in alive] == [None, None]


def test_a_compilation_after_warmup_is_an_error(make_setup: MakeSetup) -> None:
    setup = make_setup(warm=False)
    compiled(setup, "eager")
    setup.model.embed.scale_grad_by_freq = True  # a constant of the compiled graph
    with pytest.raises(ConformanceError, match="compiled again after warm-up") as caught:
        setup.harness.step((setup.harness.add(), 5))
    assert caught.value.check is Check.STEP_RAISED


def test_passes_change_the_graph(make_setup: MakeSetup) -> None:
    setup = make_setup(warm=False)
    seen: list[str] = []

    def tanh_to_relu(module: torch.fx.GraphModule) -> None:
        for node in module.graph.nodes:
            seen.append(str(node.target))
            if node.target is torch.tanh:
                node.target = torch.relu

    compiled(setup, "eager", passes=[tanh_to_relu])
    assert any("attention" in target for target in seen)
    scenario: Scenario = SCENARIOS[0]
    with pytest.raises(ConformanceError) as caught:
        scenario(setup.harness)
    assert caught.value.check is Check.LOGITS


def test_order_and_names(make_setup: MakeSetup) -> None:
    setup = make_setup(warm=False)
    with pytest.raises(ValueError, match=r"no torch\.compile backend 'nope'; available are"):
        CompiledRunner(setup.calls, compiler="nope")
    runner = CompiledRunner(setup.calls, compiler="eager")
    metadata, tokens, positions = setup.harness._build([(setup.harness.add(), 3)])
    with pytest.raises(RuntimeError, match="execute was called before warmup"):
        runner.execute(tokens, positions, metadata, None)
    runner.warmup()
    with pytest.raises(RuntimeError, match="the model is compiled once"):
        runner.warmup()
