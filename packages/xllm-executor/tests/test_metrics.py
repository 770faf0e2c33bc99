"""Metrics: names, kinds and labels of the samples."""

from __future__ import annotations

from typing import Any

from xllm_executor.metrics import metrics

STATS: dict[str, Any] = {
    "steps": {"full": 5, "eager": 2},
    "eager_reasons": {"too_large": 2},
    "graph_misses": {"full": {"no_bucket": 1}},
    "plans": [7, 3],
    "graphs": [
        {"runner": "full", "size": 1, "seconds": 0.5, "memory_bytes": 10},
        {"runner": "full", "size": 2, "seconds": 0.25, "memory_bytes": 10},
        {"runner": "piecewise", "size": 16, "seconds": 1.0, "memory_bytes": 10},
    ],
    "graph_memory_bytes": 30,
    "groups": {},
}


def test_every_sample_has_the_labels_of_its_count() -> None:
    samples = {(m.name, *sorted(m.labels.items())): (m.kind, m.value) for m in metrics(STATS)}
    kind, resident = samples.pop(("xllm_executor_resident_memory_bytes",))
    assert (kind, resident > 10**6) == ("gauge", True)
    assert {key: value for key, value in samples.items() if "device_memory" not in key[0]} == {
        ("xllm_executor_steps_total", ("runner", "full")): ("counter", 5.0),
        ("xllm_executor_steps_total", ("runner", "eager")): ("counter", 2.0),
        ("xllm_executor_eager_steps_total", ("reason", "too_large")): ("counter", 2.0),
        ("xllm_executor_graph_misses_total", ("reason", "no_bucket"), ("runner", "full")): ("counter", 1.0),
        ("xllm_executor_plans_total", ("group", "0")): ("counter", 7.0),
        ("xllm_executor_plans_total", ("group", "1")): ("counter", 3.0),
        ("xllm_executor_graphs", ("runner", "full")): ("gauge", 2.0),
        ("xllm_executor_graphs", ("runner", "piecewise")): ("gauge", 1.0),
        ("xllm_executor_graph_capture_seconds", ("runner", "full")): ("gauge", 0.75),
        ("xllm_executor_graph_capture_seconds", ("runner", "piecewise")): ("gauge", 1.0),
        ("xllm_executor_graph_memory_bytes",): ("gauge", 30.0),
    }


def test_samples_of_one_name_follow_each_other_and_agree() -> None:
    seen: dict[str, tuple[str, str]] = {}
    previous = ""
    for sample in metrics(STATS):
        if sample.name != previous:
            assert sample.name not in seen
        assert seen.setdefault(sample.name, (sample.kind, sample.help)) == (sample.kind, sample.help)
        assert (sample.kind == "counter") == sample.name.endswith("_total")
        previous = sample.name
