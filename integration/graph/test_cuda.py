"""CUDA only: execute never synchronizes, memory of the graph pool, streams."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from xllm_graph import create_runtime

MakeSetup = Callable[..., Any]
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


@contextmanager
def no_waiting() -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def decode_steps(setup: Any, count: int) -> list[tuple[Any, ...]]:
    """Arguments of `count` decode steps of five sequences, built in advance: building may synchronize."""
    harness = setup.harness
    requests = [harness.add() for _ in range(5)]
    for number in requests:
        harness.step((number, 3 + number))
    steps = []
    for _ in range(count):
        metadata, tokens, positions = harness._build([(number, 1) for number in requests])
        steps.append((tokens, positions, metadata, torch.arange(5, device="cuda")))
    torch.cuda.synchronize()
    return steps


def overlapping_steps(setup: Any) -> list[tuple[Any, ...]]:
    """Steps built in advance: prompts, a prompt with decodes, decodes of several sizes.

    Each is tokens, positions, metadata, logits_indices, their requests, rows whose tokens are sampled, and the requests
    of those rows.
    """
    harness = setup.harness
    a, b, c, d = (harness.add() for _ in range(4))
    parts = [[(a, 3), (b, 5), (c, 4)], [(b, 1), (d, 6), (a, 1)]]
    parts += [[(number, 1) for number in some] for some in ((a, b, c, d), (d, a), (b, c, d), (c,), (a, b, c, d))]
    steps = []
    for part in parts:
        metadata, tokens, positions = harness._build(part)
        ends = torch.tensor([count for _, count in part], device="cuda").cumsum(0)
        numbers = torch.tensor([number for number, _ in part], device="cuda")
        decodes = torch.tensor([count == 1 for _, count in part], device="cuda")
        steps.append((tokens, positions, metadata, ends - 1, numbers, (ends - 1)[decodes], numbers[decodes]))
    torch.cuda.synchronize()
    return steps


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_steps_are_handed_over_while_the_device_is_behind(make_cuda_setup: MakeSetup, family: str) -> None:
    setup = make_cuda_setup(family)
    steps = overlapping_steps(setup)
    latest = torch.zeros(4, dtype=torch.int32, device="cuda")  # the token that each request got last

    def run(*, overlap: bool) -> list[torch.Tensor]:
        said = []
        for tokens, positions, metadata, rows, numbers, sampled, sampled_numbers in steps:
            if overlap:
                torch.cuda._sleep(20_000_000)  # cycles: ten milliseconds
            ids = tokens.index_copy(0, sampled, latest[sampled_numbers])
            logits = setup.executor.execute(ids, positions, metadata, rows)
            latest.index_copy_(0, numbers, logits.argmax(-1).int())
            said.append(logits.clone())
            if not overlap:
                torch.cuda.synchronize()
        return said

    waited = run(overlap=False)
    overlapped = run(overlap=True)
    assert not torch.cuda.current_stream().query()  # the device has not finished yet
    for step, (one, other) in enumerate(zip(waited, overlapped, strict=True)):
        assert torch.equal(one, other), f"step {step}"


def test_a_decode_step_never_waits_for_the_device(make_cuda_setup: MakeSetup) -> None:
    setup = make_cuda_setup("qwen3")
    steps = decode_steps(setup, 11)
    setup.executor.execute(*steps[0])
    with no_waiting():
        for step in steps[1:]:
            setup.executor.execute(*step)


def test_a_trace_of_ten_decode_steps_has_no_wait_and_no_copy_to_the_host(make_cuda_setup: MakeSetup) -> None:
    setup = make_cuda_setup("qwen3")
    steps = decode_steps(setup, 11)
    setup.executor.execute(*steps[0])
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as trace:
        for step in steps[1:]:
            with torch.profiler.record_function("execute"):
                setup.executor.execute(*step)
            # As a host that reads the tokens. Otherwise execute would wait for a free buffer after some steps.
            torch.cuda.synchronize()
    events = trace.events()
    spans = [e.time_range for e in events if e.name == "execute" and e.device_type.name == "CPU"]
    inside = [e.name for e in events if any(span.start <= e.time_range.start <= span.end for span in spans)]
    assert len(spans) == inside.count("cudaGraphLaunch") == 10
    assert not [name for name in inside if name in WAITS]
    assert not [event.name for event in events if "DtoH" in event.name]


def test_twenty_buckets_cost_little_more_than_the_largest(make_cuda_setup: MakeSetup) -> None:
    def memory(buckets: str) -> Any:
        setup = make_cuda_setup("qwen3", graph_buckets=buckets, graph_token_budget=1)
        bytes_held = setup.executor.stats()["graph_memory_bytes"]
        setup.executor.shutdown()
        return bytes_held

    assert memory(",".join(str(n) for n in range(1, 21))) <= 1.3 * memory("20")


@pytest.mark.gpu
def test_the_device_is_done_with_a_session_that_is_left() -> None:
    """The first step may run on any stream, and fills buffers that the last warm-up run reads."""
    runtime = create_runtime("cuda", "cuda")
    value = torch.zeros(1, device="cuda")
    with runtime.session():
        torch.cuda._sleep(200_000_000)  # cycles: a hundred milliseconds
        value.fill_(1)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert value.item() == 1


def test_results_are_ordered_on_the_callers_stream(make_cuda_setup: MakeSetup) -> None:
    setup = make_cuda_setup("llama")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        request = setup.harness.add()
        setup.harness.step((request, 5))
        for _ in range(3):
            setup.harness.step((request, 1))
    assert setup.executor.stats()["steps"] == {"piecewise": 1, "decode_graph": 3}
