"""Metrics of an executor, by Prometheus' naming conventions, for the C++ bridge and for Python hosts.

A counter only grows while the executor lives. Names and labels are stable; `docs/embedding.md` lists them.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

Kind = Literal["counter", "gauge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One sample: a name, its labels and a value. Samples of one name have the same kind and help text."""

    name: str
    kind: Kind
    help: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def metrics(stats: Mapping[str, Any]) -> list[Metric]:
    """The samples of `ModelExecutor.stats()`, and the memory of the process and of its CUDA devices.

    Samples of one name follow each other.
    """
    return [*_steps(stats), *_graphs(stats), *_memory()]


def _steps(stats: Mapping[str, Any]) -> Iterator[Metric]:
    for runner, count in stats["steps"].items():
        yield _counter("xllm_executor_steps_total", "Steps by runner.", count, runner=runner)
    for reason, count in stats["eager_reasons"].items():
        yield _counter("xllm_executor_eager_steps_total", "Eager steps by reason.", count, reason=reason)
    for runner, reasons in stats["graph_misses"].items():
        for reason, count in reasons.items():
            yield _counter(
                "xllm_executor_graph_misses_total",
                "Steps that another runner's graph served than the preferred runner's, by reason.",
                count,
                runner=runner,
                reason=reason,
            )
    for group, count in enumerate(stats["plans"]):
        yield _counter("xllm_executor_plans_total", "Attention plans by attention group.", count, group=str(group))


def _graphs(stats: Mapping[str, Any]) -> Iterator[Metric]:
    captured: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for report in stats["graphs"]:
        runner = report["runner"]
        captured[runner] = captured.get(runner, 0) + 1
        seconds[runner] = seconds.get(runner, 0.0) + report["seconds"]
    for runner, number in captured.items():
        yield _gauge("xllm_executor_graphs", "Captured graphs by runner.", number, runner=runner)
    for runner, time in seconds.items():
        yield _gauge("xllm_executor_graph_capture_seconds", "Time that captures took.", time, runner=runner)
    yield _gauge("xllm_executor_graph_memory_bytes", "Memory of the graphs' pool.", stats["graph_memory_bytes"])


def _memory() -> Iterator[Metric]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = pages * resource.getpagesize()
    yield _gauge("xllm_executor_resident_memory_bytes", "Resident memory of the process.", resident)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # All devices, since the calling thread's current device may not be the model's.
        devices = range(torch.cuda.device_count())
        for name, text, read in (
            ("allocated", "Device memory of torch's tensors.", torch.cuda.memory_allocated),
            ("reserved", "Device memory that torch's allocator holds.", torch.cuda.memory_reserved),
        ):
            for device in devices:
                full_name = f"xllm_executor_device_memory_{name}_bytes"
                yield _gauge(full_name, text, read(device), device=str(device))


def _counter(name: str, text: str, value: float, **labels: str) -> Metric:
    return Metric(name=name, kind="counter", help=text, value=float(value), labels=labels)


def _gauge(name: str, text: str, value: float, **labels: str) -> Metric:
    return Metric(name=name, kind="gauge", help=text, value=float(value), labels=labels)
