"""What only a CUDA device shows: no waiting inside of execute, memory of the pool, streams."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

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
    """Arguments of `count` decode steps of five sequences, made ahead: building metadata may wait."""
    world = setup.world
    requests = [world.add() for _ in range(5)]
    for number in requests:
        world.step((number, 3 + number))
    steps = []
    for _ in range(count):
        metadata, tokens, positions = world._build([(number, 1) for number in requests])
        steps.append((tokens, positions, metadata, torch.arange(5, device="cuda")))
    torch.cuda.synchronize()
    return steps


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
            # As a host does that reads the tokens. One that ran far ahead would wait for a free buffer, as it must.
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


def test_results_are_ordered_on_the_callers_stream(make_cuda_setup: MakeSetup) -> None:
    setup = make_cuda_setup("llama")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        request = setup.world.add()
        setup.world.step((request, 5))
        for _ in range(3):
            setup.world.step((request, 1))
    assert setup.executor.stats()["steps"] == {"piecewise": 1, "decode_graph": 3}
