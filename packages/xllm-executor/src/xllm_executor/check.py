"""`python -m xllm_executor check`: compares a model under graphs with eager execution, and several ranks with one.

Owns the limits, runners and ranks that are tried, and the report. The checks of a step are in `xllm_graph.conformance`.
`python -m xllm_models compare` compares the model itself with transformers.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

from xllm_graph import CaptureError
from xllm_graph.conformance import SCENARIOS, ConformanceError, Limits, MixedWorkload, ReplayHarness
from xllm_metadata import LayerCache
from xllm_models import CausalLM, load_model, register_port
from xllm_models.compare import LOGITS, TOLERANCES, trace_ours

from . import tensor_parallel
from .executor import ModelExecutor

MAX_MODEL_LEN = 40
NUM_TOKENS = 24  # of the prompt whose logits are compared between ranks
RANK_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line's options."""

    directory: Path
    model: str | None = None  # MODULE:CLASS of an unregistered port
    device: str = "cpu"
    dtype: str = "float32"
    attention: str = "torch"
    tp: int = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="CHECKPOINT", help="directory with config.json and safetensors")
    parser.add_argument("--model", help="MODULE:CLASS of a port that is not registered, for this checkpoint")
    parser.add_argument("--device", default="cpu", help="cpu records graphs and replays them, cuda captures them")
    parser.add_argument("--dtype", default="float32", help="float32 (default), bfloat16 or float16")
    parser.add_argument("--attention", default="torch", help="backend under graphs; the eager reference uses torch")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="also compare N ranks with one")


def run(arguments: argparse.Namespace, write: Callable[[str], object]) -> int:
    """Writes the report. Returns 0 if every check passed, else 1. Raises ValueError or OSError for unusable input."""
    options = Options(**{name: getattr(arguments, name) for name in Options.__slots__})
    if options.tp < 1:
        raise ValueError(f"--tp is {options.tp}; it must be at least 1")
    num_failed = 0
    for name, finding in _findings(options):
        num_failed += finding is not None
        write(f"ok    {name}" if finding is None else f"FAIL  {name}: {finding}")
    write("PASS" if not num_failed else f"FAIL: {num_failed} of the above")
    return int(num_failed > 0)


def _findings(options: Options) -> Iterator[tuple[str, str | None]]:
    """Yields (check, fault), with None for a check that passed."""
    model = _load(options)
    if model.config.num_positions < MAX_MODEL_LEN:
        raise ValueError(f"the model has {model.config.num_positions} positions; the check needs {MAX_MODEL_LEN}")
    if model.device.type == "cpu":
        torch.set_num_threads(1)  # for a few tokens, threads cost more than they save
    captured = "recorded" if model.device.type == "cpu" else "cudagraphs"
    runtime = "recorded" if model.device.type == "cpu" else "cuda"
    for backend, more in ((captured, {}), ("piecewise", {"graph_runtime": runtime})):
        yield from _under_graphs(model, options, {"python_graph_backend": backend, **more})
    if options.tp > 1:
        yield f"{options.tp} ranks give the logits of one", _over_ranks(model, options)


def _load(options: Options, rank: int = 0, size: int = 1, device: str | None = None) -> CausalLM:
    if options.model is not None:
        register_port(options.model, options.directory)
    return load_model(
        options.directory, device=device or options.device, dtype=options.dtype, tp_rank=rank, tp_size=size
    )


def _under_graphs(model: CausalLM, options: Options, graph: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    """Runs every scenario of the conformance suite and a random workload in one pair of executors."""
    backend = graph["python_graph_backend"]
    limits = Limits(
        max_num_seqs=11,
        max_num_tokens=24,
        max_model_len=MAX_MODEL_LEN,
        page_size=4,
        num_pages=140,
        vocab_size=model.config.vocab_size,
    )
    try:
        harness, executor, reference = make_harness(model, limits, {"attention_backend": options.attention, **graph})
    except CaptureError as error:
        yield f"{backend}: captures", str(error)
        return
    workload = MixedWorkload(harness, num_requests=40, token_budget=24, max_prompt=20, max_answer=12)
    scenarios = {getattr(scenario, "__name__", "scenario"): scenario for scenario in SCENARIOS}
    for name, scenario in (*scenarios.items(), ("mixed_workload", lambda _: workload.run())):
        finding = None
        try:
            scenario(harness)
        except ConformanceError as error:
            finding = str(error)
        harness.clear()
        yield f"{backend}: {name}", finding
    executor.shutdown()
    reference.shutdown()


def make_harness(
    model: CausalLM, limits: Limits, options: Mapping[str, object]
) -> tuple[ReplayHarness, ModelExecutor, ModelExecutor]:
    """Makes (harness, executor with the options, eager reference executor), both warmed up.

    Shut both executors down, in this order, before the process group is destroyed.
    """
    executor, caches = _executor(model, limits, options)
    reference, reference_caches = _executor(model, limits, {"attention_backend": "torch"})
    harness = ReplayHarness(
        executor.execute,
        executor.runners,
        caches,
        reference.execute,
        reference_caches,
        limits=limits,
        device=model.device,
    )
    return harness, executor, reference


def _executor(model: CausalLM, limits: Limits, options: Mapping[str, object]) -> tuple[ModelExecutor, list[LayerCache]]:
    own = {"max_tokens_per_batch": limits.max_num_tokens, "max_model_len": limits.max_model_len}
    executor = ModelExecutor(model, {**options, **own}, limits.max_num_seqs)
    shapes = [(limits.num_pages, limits.page_size, s.num_kv_heads, s.head_dim) for s in model.attention_specs]
    # NaN, so that a read of a slot that was never written shows.
    caches = [
        LayerCache(*(torch.full(shape, torch.nan, device=model.device, dtype=model.dtype) for _ in "kv"))
        for shape in shapes
    ]
    executor.bind_kv_caches(caches)
    executor.warmup()
    return executor, caches


def _over_ranks(model: CausalLM, options: Options) -> str | None:
    """Compares the logits of several ranks, each a process, with those of one. Returns the fault."""
    want = _logits(model)
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.pt"
        multiprocessing.spawn(_rank, args=(options, store.port, out), nprocs=options.tp)  # type: ignore[attr-defined, no-untyped-call]
        ours = torch.load(out)
    error = float((ours - want).abs().max() / want.abs().max())
    tolerance = TOLERANCES[model.dtype]
    if error <= tolerance:
        return None
    return (
        f"relative error {error:.2e} beyond {tolerance:g}: some layer's result depends on the number of ranks, see "
        "docs/porting.md"
    )


def _rank(rank: int, options: Options, port: int, out: Path) -> None:
    torch.set_num_threads(1)
    device = options.device if options.device == "cpu" or ":" in options.device else f"{options.device}:{rank}"
    tensor_parallel.join(
        rank=rank,
        size=options.tp,
        host="127.0.0.1",
        port=port,
        prefix="check",
        backend="",
        device=device,
        timeout=RANK_TIMEOUT_S,
    )
    logits = _logits(_load(options, rank, options.tp, device))
    if rank == 0:
        torch.save(logits, out)
    tensor_parallel.leave()


def _logits(model: CausalLM) -> torch.Tensor:
    """[T, vocab] fp32 on the CPU, of the same tokens always, a prefill and steps of single tokens."""
    generator = torch.Generator().manual_seed(0)
    ids: Any = torch.randint(0, model.config.vocab_size, (NUM_TOKENS,), generator=generator).tolist()
    return trace_ours(model, ids).entries[LOGITS]
