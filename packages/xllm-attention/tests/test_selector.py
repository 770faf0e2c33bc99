"""Choosing a backend: by phase, automatically, and what a choice may depend on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from xllm_attention import AttentionSpec, BackendLimits, Phase, create_backend
from xllm_attention.conformance import CASES, run_case
from xllm_attention.phased import PhasedBackend
from xllm_attention.selector import auto_order, first_supported, parse_attention_backend
from xllm_metadata import build_attention_metadata

LIMITS = BackendLimits(
    device=torch.device("cpu"), dtype=torch.float32, max_num_seqs=4, max_num_tokens=16, max_model_len=12
)
STEPS = {
    Phase.DECODE: build_attention_metadata([1, 1], [3, 1], [[0], [1]], 4),
    Phase.PREFILL: build_attention_metadata([3, 2], [3, 2], [[0], [1]], 4),
    Phase.CHUNKED: build_attention_metadata([2, 1], [3, 1], [[0], [1]], 4),
}


@pytest.mark.parametrize("choice", ["decode=triton, prefill=torch", {"decode": "triton", "prefill": "torch"}])
def test_a_choice_per_phase(choice: Any) -> None:
    chosen = {Phase.DECODE: "triton", Phase.PREFILL: "torch", Phase.CHUNKED: "torch"}
    assert parse_attention_backend(choice) == chosen


def test_a_phase_that_is_not_named() -> None:
    assert parse_attention_backend("chunked=torch") == {
        Phase.DECODE: "auto",
        Phase.PREFILL: "auto",
        Phase.CHUNKED: "torch",
    }
    assert parse_attention_backend("prefill=a,chunked=b") == {
        Phase.DECODE: "auto",
        Phase.PREFILL: "a",
        Phase.CHUNKED: "b",
    }
    assert parse_attention_backend("torch") == "torch"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("decode=triton,decod=torch", "has 'decod=torch'; write phase=name, phases are"),
        ("decode=triton,torch", "has 'torch'"),
        ("decode=", "has 'decode='"),
        ("decode=torch,decode=triton", "names the phase 'decode' twice"),
    ],
)
def test_a_choice_that_means_nothing(spec: AttentionSpec, choice: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_backend(choice, [spec], LIMITS)


def test_an_unknown_name_in_a_choice(spec: AttentionSpec) -> None:
    with pytest.raises(ValueError, match=r"no attention backend 'nonesuch'; available are \['torch', 'triton'\]"):
        create_backend("decode=nonesuch", [spec], LIMITS)


@pytest.mark.parametrize("phase", Phase)
def test_auto_knows_an_order_for_every_phase(phase: Phase) -> None:
    assert auto_order("cpu")[phase] == ("torch",)
    assert sorted(auto_order("cuda")[phase]) == ["flashinfer", "torch", "triton"]


def test_auto_takes_the_first_that_serves_the_model() -> None:
    names = ("triton", "flashinfer", "torch")
    assert first_supported(Phase.DECODE, names, dict.fromkeys(names)) == "triton"
    refusals = {"triton": "no triton here", "flashinfer": None, "torch": None}
    assert first_supported(Phase.DECODE, names, refusals) == "flashinfer"
    refusals = {"triton": "head_dim 72", "flashinfer": "head_dim 72", "torch": None}
    assert first_supported(Phase.PREFILL, names, refusals) == "torch"
    refusals = {"triton": "why a", "flashinfer": "why b", "torch": "why c"}
    with pytest.raises(ValueError, match=r"can serve a decode step.*'triton': why a; 'flashinfer': why b; 'torch'"):
        first_supported(Phase.DECODE, names, refusals)


def test_auto_on_a_cpu_is_torch(spec: AttentionSpec) -> None:
    assert create_backend("auto", [spec], LIMITS).name == "torch"
    assert create_backend("decode=torch", [spec], LIMITS).name == "torch"


@pytest.fixture
def phased(spec: AttentionSpec, make_caches: Callable[..., Any]) -> PhasedBackend:
    """Decode by one backend, the rest by another; head dim 16, which the interpreted kernels serve."""
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
    backend = create_backend("decode=triton,prefill=torch", [spec, spec], LIMITS)
    assert isinstance(backend, PhasedBackend)
    backend.bind_kv_caches(make_caches([spec, spec]))
    return backend


def test_each_phase_has_its_backend(phased: PhasedBackend) -> None:
    assert phased.name == "decode=triton,prefill=torch"
    assert phased.capabilities.full_graph_phases == {Phase.DECODE}
    backends = {backend.name: backend for backend in phased.by_phase.values()}
    planned = dict.fromkeys(backends, 0)
    for count, (phase, metadata) in enumerate(STEPS.items(), 1):
        phased.plan(metadata)
        planned["triton" if phase is Phase.DECODE else "torch"] += 1
        assert {name: backend.plan_counts for name, backend in backends.items()} == {
            name: (plans,) for name, plans in planned.items()
        }
        assert phased.plan_counts == (count,)
        assert ("triton" if phase is Phase.DECODE else "torch") in str(phased.plan_layout)


def test_a_failed_plan_leaves_no_plan(phased: PhasedBackend) -> None:
    phased.plan(STEPS[Phase.DECODE])
    with pytest.raises(ValueError, match="cannot run a prefill step in a full graph"):
        phased.plan(STEPS[Phase.PREFILL], graph=True)
    q, k = torch.ones(5, 4, 16), torch.ones(5, 2, 16)
    with pytest.raises(RuntimeError, match="run was called before plan"):
        phased.run(q, k, k, torch.empty_like(q), 0)


@pytest.mark.parametrize(
    "name", ["prefill", "mixed", "graph-decode", "decode-groups3", "prefill-sinks", "decode-sinks-windows-group5"]
)
def test_a_choice_passes_the_conformance_suite(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    assert run_case(partial(create_backend, "decode=triton,prefill=torch"), case).refused is None
