"""Warm-up: every shape runs before its capture, other threads are not affected, a failure is undone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from xllm_graph import CaptureError, CaptureReport
from xllm_graph.conformance import SCENARIOS, Limits

MakeSetup = Callable[..., Any]
# Fewer tokens than the largest bucket has, in as many sequences as there may be.
SHORT = Limits(max_num_seqs=1, max_num_tokens=5, max_model_len=5, page_size=4, num_pages=8, vocab_size=50)


@pytest.mark.parametrize("options", [{}, {"limits": SHORT}], ids=["long", "short"])
def test_every_shape_runs_before_it_is_captured(make_setup: MakeSetup, options: dict[str, Limits]) -> None:
    """A kernel that compiles or tunes itself must do so outside of the capture."""
    setup = make_setup(warm=False, **options)
    forward = type(setup.model).forward
    capturing = [False]
    seen: list[tuple[bool, int]] = []

    def watched(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        seen.append((capturing[0], tokens.shape[0]))
        return forward(setup.model, tokens, positions)

    begin, end = setup.runtime.begin, setup.runtime.end
    setup.runtime.begin = lambda: (capturing.__setitem__(0, True), begin())
    setup.runtime.end = lambda: (capturing.__setitem__(0, False), end())[1]
    setup.model.forward = watched
    setup.runners.warmup()
    captured = [size for is_capture, size in seen if is_capture]
    assert captured == [*reversed(setup.piecewise.buckets), *reversed(setup.decode.buckets)]
    for index, (is_capture, size) in enumerate(seen):
        assert not is_capture or (False, size) in seen[:index]


def test_attention_of_every_kind_runs_in_warmup(make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_setup(warm=False)
    phases = set()
    plan_step = type(setup.backend)._plan_step

    def watched(self: Any, step: Any) -> None:
        if step.num_tokens:
            phases.add((step.phase.value, step.graph))
        plan_step(self, step)

    monkeypatch.setattr(type(setup.backend), "_plan_step", watched)
    setup.runners.warmup()
    assert phases == {("prefill", False), ("chunked", False), ("decode", False), ("decode", True)}


def test_decode_of_all_sequences_runs_before_each_piecewise_capture(
    make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels may have a variant for each number of sequences, and the largest buckets hold more tokens than those."""
    setup = make_setup(warm=False)
    planned: list[int] = []
    plan_step = type(setup.backend)._plan_step

    def watched(self: Any, step: Any) -> None:
        if step.num_tokens and step.phase.value == "decode":
            planned.append(step.num_seqs)
        plan_step(self, step)

    monkeypatch.setattr(type(setup.backend), "_plan_step", watched)
    setup.piecewise.warmup()
    expected = [min(size, setup.backend.limits.max_num_seqs) for size in reversed(setup.piecewise.buckets)]
    assert planned[: len(expected)] == expected


def test_warmup_writes_nothing_and_reports_everything(make_setup: MakeSetup) -> None:
    setup = make_setup(warm=False)
    reports: list[CaptureReport] = []
    setup.runners.warmup(reports.append)
    assert all(torch.isnan(cache).all() for cache in setup.harness._caches)
    assert tuple(reports) == setup.runners.reports
    assert len(reports) == setup.runners.num_captures
    assert {report.num_graphs for report in setup.decode.reports} == {1}
    assert {report.num_graphs for report in setup.piecewise.reports} == {3}  # two attention layers
    assert sum(report.memory_bytes for report in reports) == setup.runners.memory_bytes


def test_work_in_another_thread_goes_on_during_a_capture(make_setup: MakeSetup) -> None:
    """Code outside of the capture may read values, allocate and synchronize."""
    setup = make_setup(warm=False)
    stop = threading.Event()

    def work() -> set[float]:
        results: set[float] = set()
        x = torch.ones(64, device=setup.backend.limits.device)
        while not stop.is_set():
            results |= {(x * 2).sum().item(), x.tolist()[0]}
        return results

    with ThreadPoolExecutor(1) as pool:
        results = pool.submit(work)
        try:
            setup.runners.warmup()
        finally:
            stop.set()
        assert results.result() == {128.0, 1.0}
    SCENARIOS[-1](setup.harness)


def test_a_step_in_another_thread_than_the_warmup(make_setup: MakeSetup) -> None:
    setup = make_setup()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(SCENARIOS[-1], setup.harness).result()


def test_runners_made_and_warmed_up_in_inference_mode_serve_outside(make_setup: MakeSetup) -> None:
    """Static buffers are ordinary tensors: later steps fill them, and hosts change results in place."""
    with torch.inference_mode():
        setup = make_setup()
    for scenario in (SCENARIOS[0], SCENARIOS[-1]):
        scenario(setup.harness)
        setup.harness.clear()
    request = setup.harness.add()
    for count in (3, 1):
        metadata, tokens, positions = setup.harness._build([(request, count)])
        rows = torch.zeros(1, dtype=torch.int32, device=tokens.device)
        for wanted in (rows, None):
            with torch.inference_mode():
                setup.runners.execute(tokens, positions, metadata, wanted)
            setup.runners.execute(tokens, positions, metadata, wanted).mul_(2)


def test_a_failed_capture_leaves_eager_execution_usable(make_setup: MakeSetup) -> None:
    setup = make_setup(warm=False)
    forward = type(setup.model).forward

    def failing(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = forward(setup.model, tokens, positions)
        hidden.sum().item()
        return hidden

    setup.model.forward = failing
    # CUDA's error is not a CaptureError: it comes from the device, which is asked for a value during the capture.
    error, message = {
        "recorded": (CaptureError, r"item\(\) of a tensor brings its values to the host"),
        "cuda": (RuntimeError, "captur"),
    }[setup.runtime.name]
    with pytest.raises(error, match=message):
        setup.runners.warmup()
    del setup.model.forward
    request = setup.harness.add()
    assert setup.harness.step((request, 3)).tolist()
    assert setup.runners.stats.eager_reasons == {"not_warmed_up": 1}


@pytest.mark.parametrize("name", ["piecewise", "decode_graph"])
def test_a_warmup_that_fails_midway_is_undone(make_setup: MakeSetup, name: str) -> None:
    """Afterwards steps are eager with the reason not_warmed_up, and warm-up may be tried again."""
    setup = make_setup(warm=False)

    def fail(report: CaptureReport) -> None:
        if (report.runner, report.size) == (name, 4):
            raise MemoryError(f"no memory after size {report.size}")

    for runners in (setup.decode if name == "decode_graph" else setup.piecewise, setup.runners):
        with pytest.raises(MemoryError, match="no memory after size 4"):
            runners.warmup(fail)
    assert setup.runners.reports == ()
    assert setup.runners.memory_bytes == 0
    request = setup.harness.add()
    setup.harness.step((request, 3))
    setup.harness.step((request, 1))
    assert setup.runners.stats.eager_reasons == {"not_warmed_up": 2}
    setup.runners.warmup()
    assert len(setup.runners.reports) == setup.runners.num_captures
    with pytest.raises(RuntimeError, match="graphs are captured once"):
        setup.runners.warmup(fail)
    setup.harness.step((request, 3))
    setup.harness.step((request, 1))
    assert setup.runners.stats.steps == {"eager": 2, "piecewise": 1, "decode_graph": 1}


def test_release_gives_the_memory_back(make_setup: MakeSetup) -> None:
    setup = make_setup()
    assert setup.runners.memory_bytes > 0
    setup.runners.release()
    assert setup.runners.memory_bytes == 0
    assert setup.runners.reports == ()
    setup.harness.step((setup.harness.add(), 3))
    assert set(setup.runners.stats.steps) == {"eager"}
