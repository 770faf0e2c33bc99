"""Runs the conformance suite's steps over a model, for the `check` command.

Owns the pair of executors, and the report of a step in which the model raised an exception.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from xllm_graph import CaptureError
from xllm_graph.conformance import (
    SCENARIOS,
    Check,
    ConformanceError,
    Execute,
    Limits,
    MixedWorkload,
    ReplayHarness,
)
from xllm_metadata import AttentionMetadata, LayerCache, allocate_caches
from xllm_models import CausalLM

from .executor import ModelExecutor

MAX_MODEL_LEN = 40

Finding = tuple[str, str | None]  # (check, fault), with None for a check that passed

_OWN_PACKAGES = ("torch", "xllm_attention", "xllm_executor", "xllm_graph", "xllm_metadata")


def graph_options(device: torch.device) -> list[dict[str, str]]:
    """The executor's options of the two kinds of graphs: full with piecewise, and piecewise alone."""
    on_cpu = device.type == "cpu"
    piecewise = {"python_graph_backend": "piecewise", "graph_runtime": "recorded" if on_cpu else "cuda"}
    return [{"python_graph_backend": "recorded" if on_cpu else "cudagraphs"}, piecewise]


def under_graphs(model: CausalLM, attention: str, graph: Mapping[str, str]) -> Iterator[Finding]:
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
        harness, executor, reference = make_harness(model, limits, {"attention_backend": attention, **graph})
    except CaptureError as error:
        yield f"{backend}: captures", str(error)
        return
    except Exception as error:
        if isinstance(error, ValueError) and not raised_in_model(error):
            raise  # an option that this model or device does not allow
        yield f"{backend}: warm-up", raised(error)
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
        _reporting(executor.execute, "under graphs"),
        executor.runners,
        caches,
        _reporting(reference.execute, "eagerly"),
        reference_caches,
        limits=limits,
        device=model.device,
    )
    return harness, executor, reference


def _executor(model: CausalLM, limits: Limits, options: Mapping[str, object]) -> tuple[ModelExecutor, list[LayerCache]]:
    own = {"max_tokens_per_batch": limits.max_num_tokens, "max_model_len": limits.max_model_len}
    executor = ModelExecutor(model, {**options, **own}, limits.max_num_seqs)
    # NaN, so that a read of a slot that was never written shows.
    caches = allocate_caches(
        model.cache_specs,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        num_slots=limits.num_slots,
        device=model.device,
        fill=torch.nan,
    )
    executor.bind_kv_caches(caches)
    executor.warmup()
    return executor, caches


def _reporting(execute: Execute, how: str) -> Execute:
    """`execute`, whose exceptions become a `ConformanceError` that names the step and the model's line."""
    num_steps = 0

    def call(
        tokens: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor | None,
    ) -> torch.Tensor:
        nonlocal num_steps
        num_steps += 1
        try:
            return execute(tokens, positions, metadata, logits_indices)
        except Exception as error:
            num_seqs = metadata.paged_kv_last_page_len_host.shape[0]
            kind = "prefill" if metadata.is_prefill else "chunked prefill" if metadata.is_chunked_prefill else "decode"
            step = f"step {num_steps} ({kind}: {num_seqs} sequences, {tokens.shape[0]} tokens) raised {how}"
            raise ConformanceError(Check.STEP_RAISED, f"{step}: {raised(error)}") from error

    return call


def raised_in_model(error: BaseException) -> bool:
    """Whether a module's forward raised the exception, not the code that prepares a step."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(Path(frame.filename).parts[-2:] == ("modules", "module.py") for frame in frames)


def raised(error: BaseException) -> str:
    """The type and message of an exception, and the line of the model that raised it."""
    message = " ".join(str(error).split("\n")[0].split())
    frame = _model_frame(error)
    where = "" if frame is None else f" ({Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line})"
    return f"{type(error).__name__}: {message}{where}"


def _model_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of the model: outside of PyTorch, of the layers, and of the packages that run a model."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        parts = Path(frame.filename).parts
        own = any(package in parts for package in _OWN_PACKAGES)
        if not own and ("xllm_models" not in parts or "models" in parts) and "<" not in frame.filename:
            return frame
    return None
