"""ModelExecutor with graphs: the runner of each step, the counters, and the options."""

from __future__ import annotations

import copy
import io
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from xllm_attention import BackendCapabilities
from xllm_attention.backends.torch_backend import TorchBackend
from xllm_attention.op_library import define_op
from xllm_executor import ExecutorConfig, ModelExecutor
from xllm_executor import executor as executor_module
from xllm_executor.runners import Sizes
from xllm_metadata import AttentionMetadata, build_attention_metadata
from xllm_models import CausalLM

Caches = Callable[[CausalLM], list[tuple[torch.Tensor, torch.Tensor]]]
Step = tuple[torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor]


@define_op(mutates=["x"], collective=True)
def _executor_test_exchange_(x: torch.Tensor) -> None:
    x.mul_(2)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_executor(
    model: CausalLM, make_caches: Caches, max_seqs: int = 5, *, warm: bool = True, **config: Any
) -> ModelExecutor:
    options = {"python_graph_backend": "recorded", "max_tokens_per_batch": 12, "max_model_len": 16} | config
    executor = ModelExecutor(model, options, max_seqs)
    executor.bind_kv_caches(make_caches(model))
    if warm:
        executor.warmup()
    return executor


def step(*lens: tuple[int, int]) -> Step:
    """A step of (new tokens, KV length) with a page for every four tokens, and the last row of each."""
    tables = [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(len(lens))]
    metadata = build_attention_metadata([q for q, _ in lens], [kv for _, kv in lens], tables, page_size=4)
    positions = torch.tensor([p for q, kv in lens for p in range(kv - q, kv)], dtype=torch.int32)
    last = torch.tensor([q for q, _ in lens]).cumsum(0) - 1
    return torch.arange(positions.shape[0], dtype=torch.int32) * 7 % 97, positions, metadata, last


PREFILL, CHUNKED, DECODE = step((4, 4), (3, 3)), step((2, 6), (1, 4)), step((1, 7), (1, 5))


def run_all(executor: ModelExecutor) -> list[torch.Tensor]:
    return [executor.execute(*one).clone() for one in (PREFILL, CHUNKED, DECODE)]


def fail_at_last_bucket(bar: object, what: str) -> None:
    if what == "decode_graph 1":
        raise MemoryError("at the last bucket")


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"python_graph_backend": "off"}, {"eager": 3}),
        ({}, {"piecewise": 2, "decode_graph": 1}),
        ({"logits_in_graph": False}, {"piecewise": 2, "decode_graph": 1}),
        ({"python_graph_backend": "piecewise", "graph_runtime": "recorded"}, {"piecewise": 3}),
        ({"python_graph_backend": "aot_eager"}, {"compiled": 3}),
    ],
)
def test_every_backend_gives_the_same(
    small_model: CausalLM, make_caches: Caches, options: dict[str, Any], steps: dict[str, int]
) -> None:
    torch.compiler.reset()
    reference = run_all(make_executor(small_model, make_caches, python_graph_backend="off"))
    executor = make_executor(small_model, make_caches, eager_is_error=True, **options)
    assert_same(run_all(executor), reference)
    stats = executor.stats()
    assert stats["steps"] == steps
    assert stats["plans"] == [3]
    assert stats["eager_reasons"] == ({"graphs_off": 3} if "eager" in steps else {})
    assert stats["graph_misses"] == {}


def test_hidden_states_without_the_head(small_model: CausalLM, make_caches: Caches) -> None:
    eager = make_executor(small_model, make_caches, python_graph_backend="off")
    executor = make_executor(small_model, make_caches, logits_in_graph=False)
    for one in (PREFILL, CHUNKED, DECODE):
        torch.testing.assert_close(executor.execute(*one[:3]), eager.execute(*one[:3]), rtol=1e-5, atol=1e-5)
    assert executor.execute(*DECODE[:3]).shape == (2, 32)


def test_what_each_graph_cost(small_model: CausalLM, make_caches: Caches) -> None:
    stats = make_executor(small_model, make_caches).stats()
    graphs: Any = stats["graphs"]
    sizes = [(graph["runner"], graph["size"]) for graph in graphs]
    assert sizes == [("piecewise", size) for size in (16, 8, 4, 2, 1)] + [("decode_graph", n) for n in (8, 4, 2, 1)]
    assert {graph["num_graphs"] for graph in graphs} == {1, 3}
    assert all(graph["seconds"] > 0 for graph in graphs)
    assert stats["graph_memory_bytes"] == sum(graph["memory_bytes"] for graph in graphs) > 0


def test_many_buckets_cost_little_more_than_the_largest(small_model: CausalLM, make_caches: Caches) -> None:
    def memory(buckets: str) -> Any:
        executor = make_executor(small_model, make_caches, max_seqs=20, graph_buckets=buckets, graph_token_budget=1)
        return executor.stats()["graph_memory_bytes"]

    assert memory(",".join(str(n) for n in range(1, 21))) <= 1.3 * memory("20")


def test_a_step_over_the_token_budget_is_eager_for_that_reason(small_model: CausalLM, make_caches: Caches) -> None:
    executor = make_executor(small_model, make_caches, graph_token_budget=4)
    run_all(executor)
    assert executor.stats()["steps"] == {"eager": 1, "piecewise": 1, "decode_graph": 1}
    assert executor.stats()["eager_reasons"] == {"over_token_budget": 1}
    strict = make_executor(small_model, make_caches, graph_token_budget=4, eager_is_error=True)
    message = r"a step of 7 tokens would run eagerly \(decode_graph: not_decode, piecewise: over_token_budget\)"
    with pytest.raises(RuntimeError, match=message):
        strict.execute(*PREFILL)
    assert strict.stats()["steps"] == {}
    strict.execute(*CHUNKED)


def test_steps_before_warmup_are_eager_for_that_reason(small_model: CausalLM, make_caches: Caches) -> None:
    executor = make_executor(small_model, make_caches, warm=False)
    run_all(executor)
    assert executor.stats()["eager_reasons"] == {"not_warmed_up": 3}
    executor.warmup()
    run_all(executor)
    assert executor.stats()["steps"] == {"eager": 3, "piecewise": 2, "decode_graph": 1}
    with pytest.raises(RuntimeError, match="graphs are captured once"):
        executor.warmup()


def test_a_warmup_that_fails_may_be_tried_again(
    small_model: CausalLM, make_caches: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(small_model, make_caches, warm=False)
    with monkeypatch.context() as patch:
        patch.setattr(executor_module, "_advance", fail_at_last_bucket)
        with pytest.raises(MemoryError, match="at the last bucket"):
            executor.warmup()
    run_all(executor)
    assert executor.stats()["eager_reasons"] == {"not_warmed_up": 3}
    assert executor.stats()["graphs"] == []
    assert executor.stats()["graph_memory_bytes"] == 0
    executor.warmup()
    run_all(executor)
    assert executor.stats()["steps"] == {"eager": 3, "piecewise": 2, "decode_graph": 1}
    assert executor.stats()["plans"] == [6]


def test_decode_beyond_its_buckets_runs_piecewise_and_is_counted(small_model: CausalLM, make_caches: Caches) -> None:
    executor = make_executor(small_model, make_caches, graph_buckets="1")
    run_all(executor)
    assert executor.stats()["steps"] == {"piecewise": 3}
    assert executor.stats()["graph_misses"] == {"decode_graph": {"over_graph_buckets": 1}}


def test_a_backend_that_cannot_capture(
    small_model: CausalLM, make_caches: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchBackend, "capabilities", BackendCapabilities())
    executor = make_executor(small_model, make_caches, eager_is_error=True)
    run_all(executor)
    assert executor.stats()["steps"] == {"piecewise": 3}
    assert executor.stats()["graph_misses"] == {"decode_graph": {"backend_cannot_capture": 1}}


def test_ops_that_no_graph_may_hold_leave_no_full_graph(small_model: CausalLM, make_caches: Caches) -> None:
    executor = make_executor(small_model, make_caches, graph_cut_ops="xllm::silu_and_mul", eager_is_error=True)
    reference = run_all(make_executor(small_model, make_caches, python_graph_backend="off"))
    assert_same(run_all(executor), reference)
    stats: Any = executor.stats()
    assert stats["steps"] == {"piecewise": 3}
    assert stats["graph_misses"] == {"decode_graph": {"ops_not_captured": 1}}
    assert {graph["num_graphs"] for graph in stats["graphs"]} == {5}


def test_collectives_that_no_graph_may_hold_leave_no_full_graph(small_model: CausalLM, make_caches: Caches) -> None:
    forward = small_model.forward

    def with_collective(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = forward(tokens, positions).clone()
        _executor_test_exchange_(hidden)
        return hidden + 0

    small_model.forward = with_collective  # type: ignore[method-assign]
    executor = make_executor(small_model, make_caches, graph_cut_collectives=True, eager_is_error=True)
    reference = run_all(make_executor(small_model, make_caches, python_graph_backend="off"))
    assert_same(run_all(executor), reference)
    stats: Any = executor.stats()
    assert stats["steps"] == {"piecewise": 3}
    assert stats["graph_misses"] == {"decode_graph": {"ops_not_captured": 1}}
    assert {graph["num_graphs"] for graph in stats["graphs"]} == {4}


def test_no_step_but_decode_misses_the_decode_graph(small_model: CausalLM, make_caches: Caches) -> None:
    """Also in the message of a step that may not run eagerly."""
    executor = make_executor(
        small_model, make_caches, graph_cut_ops="xllm::silu_and_mul", graph_token_budget=1, eager_is_error=True
    )
    message = r"7 tokens would run eagerly \(decode_graph: not_decode, piecewise: over_token_budget\)"
    with pytest.raises(RuntimeError, match=message):
        executor.execute(*PREFILL)
    message = r"2 tokens would run eagerly \(decode_graph: ops_not_captured, piecewise: over_token_budget\)"
    with pytest.raises(RuntimeError, match=message):
        executor.execute(*DECODE)


def test_capacity_is_rounded_up_and_the_host_held_to_its_limit(small_model: CausalLM, make_caches: Caches) -> None:
    """With a limit of 100, 97 to 100 sequences have a bucket. The host may not use the padding rows of that bucket."""
    shape = (128, 4, 2, 8)
    executor = ModelExecutor(
        small_model,
        {"python_graph_backend": "recorded", "graph_token_budget": 1, "max_model_len": 4, "max_tokens_per_batch": 100},
        100,
    )
    executor.bind_kv_caches([(torch.zeros(shape), torch.zeros(shape)) for _ in small_model.layer_specs])
    executor.warmup()
    for size in (96, 97, 100):
        metadata = build_attention_metadata([1] * size, [1] * size, [[i] for i in range(size)], page_size=4)
        tokens = torch.zeros(size, dtype=torch.int32)
        assert executor.execute(tokens, tokens, metadata, torch.tensor([size - 1])).isfinite().all()
    assert executor.stats()["steps"] == {"decode_graph": 3}
    metadata = build_attention_metadata([1] * 101, [1] * 101, [[i] for i in range(101)], page_size=4)
    tokens = torch.zeros(101, dtype=torch.int32)
    with pytest.raises(ValueError, match="number of sequences 101 exceeds max_seqs_per_batch 100"):
        executor.execute(tokens, tokens, metadata, tokens[:1])


def test_weights_loaded_again_are_what_graphs_use(small_model: CausalLM, make_caches: Caches) -> None:
    executor = make_executor(small_model, make_caches)
    run_all(executor)
    other = copy.deepcopy(small_model)
    with torch.no_grad():
        for ours, theirs in zip(small_model.parameters(), other.parameters(), strict=True):
            theirs.mul_(1.1)
            ours.copy_(theirs)
    reference = run_all(make_executor(other, make_caches, python_graph_backend="off"))
    assert_same(run_all(executor), reference)


def test_progress_on_stderr_only_when_asked(
    small_model: CausalLM, make_caches: Caches, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bar on a terminal, and lines elsewhere."""
    make_executor(small_model, make_caches)
    assert capsys.readouterr().err == ""
    make_executor(small_model, make_caches, progress=True)
    assert capsys.readouterr().err == "warm-up: 9 of 9 graphs captured, last decode_graph 1\n"
    monkeypatch.setattr("xllm_executor.executor._LOG_INTERVAL", 0.0)
    make_executor(small_model, make_caches, progress=True)
    assert [line.split(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"warm-up: {number} of 9 graphs captured" for number in range(1, 10)
    ]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    make_executor(small_model, make_caches, progress=True)
    shown = capsys.readouterr().err
    assert "capturing graphs: 100%" in shown
    assert "warm-up" not in shown


class _Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")


@pytest.mark.parametrize("stderr", [None, _Broken()])
def test_a_progress_that_cannot_be_written_fails_nothing(
    small_model: CausalLM, make_caches: Caches, monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO | None
) -> None:
    monkeypatch.setattr("sys.stderr", stderr)
    executor = make_executor(small_model, make_caches, progress=True)
    monkeypatch.undo()
    run_all(executor)
    assert "eager" not in executor.stats()["steps"]


def test_cuda_graphs_on_a_cpu_are_refused(small_model: CausalLM, make_caches: Caches) -> None:
    for backend in ("cudagraphs", "piecewise"):
        with pytest.raises(ValueError, match="device cpu; CUDA graphs serve"):
            make_executor(small_model, make_caches, python_graph_backend=backend)


def test_shutdown_keeps_the_counts(small_model: CausalLM, make_caches: Caches) -> None:
    executor = make_executor(small_model, make_caches)
    run_all(executor)
    before = executor.stats()
    executor.shutdown()
    assert executor.stats() == before
    with pytest.raises(RuntimeError, match="the executor was shut down"):
        _ = executor.runners


@pytest.mark.parametrize(
    ("options", "one", "runner"),
    [
        ({"python_graph_backend": "off"}, PREFILL, "eager"),
        ({"python_graph_backend": "off"}, DECODE, "eager"),
        ({}, DECODE, "decode_graph"),
        ({}, CHUNKED, "piecewise"),
        ({"python_graph_backend": "piecewise", "graph_runtime": "recorded"}, DECODE, "piecewise"),
    ],
)
def test_a_page_table_shorter_than_the_kv_length_is_refused(
    small_model: CausalLM, make_caches: Caches, options: dict[str, Any], one: Step, runner: str
) -> None:
    executor = make_executor(small_model, make_caches, **options)
    tokens, positions, last = one[0], one[1], one[3]
    metadata: Any = one[2]
    pages = metadata.paged_kv_indptr_host.clone()
    pages[-1] -= 1  # the last sequence has a page too few
    indices = metadata.paged_kv_indices[:-1]
    short = replace(metadata, paged_kv_indptr_host=pages, paged_kv_indptr=pages.clone(), paged_kv_indices=indices)
    with pytest.raises(ValueError, match=r"paged_kv_indptr_host gives sequence 1 \d pages of 4; its KV length \d in"):
        executor.execute(tokens, positions, short, last)
    short = replace(metadata, paged_kv_indices=indices)
    with pytest.raises(ValueError, match=r"paged_kv_indptr_host ends at \d; paged_kv_indices has \d entries"):
        executor.execute(tokens, positions, short, last)
    with pytest.raises(ValueError, match="slot_mapping is on device meta; it must be on cpu"):
        executor.execute(tokens, positions, replace(metadata, slot_mapping=metadata.slot_mapping.to("meta")), last)
    assert executor.execute(*one).shape == (2, 97)
    assert executor.stats()["steps"] == {runner: 1}


def test_default_sizes_fit_the_device() -> None:
    """On a CPU a capture computes its step: 8192 tokens of a real model would take minutes."""
    config = ExecutorConfig(python_graph_backend="recorded")
    cpu, cuda = (Sizes.of(config, 100, 256, torch.device(device)) for device in ("cpu", "cuda"))
    assert (cpu.decode_buckets, cpu.token_buckets) == ((1, 2, 4, 8, 16, 32, 64, 128),) * 2
    assert cuda.decode_buckets == (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112)
    assert cuda.token_buckets[-1] == 8192
    assert (cpu.max_num_tokens, cuda.max_num_tokens) == (8192, 8192)
    for max_seqs, largest in ((1, 1), (2, 2), (3, 4), (8, 8), (9, 16)):
        assert Sizes.of(config, max_seqs, 256, torch.device("cpu")).decode_buckets[-1] == largest
    for max_model_len, largest in ((256, 128), (512, 64), (8192, 4), (10000, 2), (131072, 1)):
        assert Sizes.of(config, 100, max_model_len, torch.device("cpu")).decode_buckets[-1] == largest
    asked = Sizes.of(replace(config, graph_token_budget=300, graph_buckets="1,3"), 3, 4096, torch.device("cpu"))
    assert (asked.decode_buckets, asked.token_buckets[-1]) == ((1, 3), 512)


def test_the_warm_up_logs_its_progress(
    small_model: CausalLM, make_caches: Caches, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "xllm_executor")
    make_executor(small_model, make_caches)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("xllm_executor")]
    assert messages == ["warm-up: 9 of 9 graphs captured, last decode_graph 1"]
    caplog.clear()
    monkeypatch.setattr("xllm_executor.executor._LOG_INTERVAL", 0.0)
    make_executor(small_model, make_caches)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("xllm_executor")]
    assert [message.split(":")[1].split(",")[0] for message in messages] == [
        f" {number} of 9 graphs captured" for number in range(1, 10)
    ]
