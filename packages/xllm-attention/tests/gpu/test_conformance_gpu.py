"""Every backend passes the conformance suite on a CUDA device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from xllm_attention import create_backend
from xllm_attention.conformance import CASES, Case, check_large_cache, run_case

pytestmark = pytest.mark.gpu

BY_NAME = {case.name: case for case in CASES}
SHAPES = ("decode", "prefill", "mixed")
# FlashInfer compiles a kernel for every head dim, dtype, window or not, and cap or not: the whole table runs on one of
# them, the cases that are about the others on theirs.
PLAIN_ON_FLASHINFER = tuple(
    replace(case, head_dim=128, dtype=torch.bfloat16, windows=(0,) * len(case.windows), soft_cap=0.0)
    for case in CASES
    if not (case.sinks or case.latent or case.v_head_dim)
    # FlashInfer reads the NaN of an fp8 cache as a finite number.
    and not (case.bad_tokens and case.fp8)
)
# Layers whose values have the keys' size, and a cache of their own.
EQUAL_SIZES = tuple(case for case in CASES if not (case.latent or case.v_head_dim))
OTHER_SIZES = tuple(case for case in CASES if case.latent or case.v_head_dim)
LATENT = tuple(case for case in CASES if case.latent and case.v_head_dim)
LATENT_BLOCKS = tuple(  # two blocks of 64 query heads, as DeepSeek-V3 has on one rank
    replace(BY_NAME[name], num_heads=128, head_dim=576, v_head_dim=512)
    for name in (
        *(f"{shape}-latent" for shape in SHAPES), "graph-decode-latent", "long-decode-latent", "long-chunk-latent",
    )
)  # fmt: skip
OTHER_ON_FLASHINFER = tuple(
    replace(BY_NAME[f"{shape}-{label}"], head_dim=head_dim, dtype=dtype)
    for labels, head_dim, dtype in (
        (("window1", "window2", "window15", "window16", "window17", "window1000", "groups3"), 128, torch.bfloat16),
        (("page1-window1", "page1-window2", "cap"), 128, torch.bfloat16),
        (("group1", "group5", "group8", "page1"), 64, torch.float16),
        (("dim256",), 256, torch.float16),
    )
    for label in labels
    for shape in SHAPES
) + tuple(
    replace(BY_NAME[name], head_dim=128, dtype=torch.bfloat16)
    for name in ("graph-decode-windows", "graph-decode-cap", "long-prefill-window", "long-chunk", "long-chunk-cap")
)


@pytest.mark.parametrize("case", EQUAL_SIZES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_table(backend: str, case: Case) -> None:
    assert run_case(partial(create_backend, backend), case, device="cuda").refused is None


@pytest.mark.parametrize("case", OTHER_SIZES, ids=lambda case: case.name)
def test_other_value_sizes_are_served_by_torch_and_refused_by_name_elsewhere(case: Case) -> None:
    assert run_case(partial(create_backend, "torch"), case, device="cuda").refused is None
    for backend in ("triton", "flashinfer"):
        if backend == "triton" and case in LATENT:
            continue
        refused = run_case(partial(create_backend, backend), case, device="cuda").refused
        assert refused is not None
        assert "cannot serve layer 0" in refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", LATENT, ids=lambda case: case.name)
def test_latent_layers_on_triton(case: Case, dtype: torch.dtype) -> None:
    assert run_case(partial(create_backend, "triton"), replace(case, dtype=dtype), device="cuda").refused is None


@pytest.mark.parametrize("case", LATENT_BLOCKS, ids=lambda case: case.name)
def test_blocks_of_latent_heads_on_triton(case: Case) -> None:
    case = replace(case, dtype=torch.bfloat16)
    assert run_case(partial(create_backend, "triton"), case, device="cuda").refused is None


@pytest.mark.parametrize("case", EQUAL_SIZES, ids=lambda case: case.name)
def test_triton_in_bfloat16(case: Case) -> None:
    case = replace(case, dtype=torch.bfloat16)
    assert run_case(partial(create_backend, "triton"), case, device="cuda").refused is None


@pytest.mark.parametrize("case", PLAIN_ON_FLASHINFER, ids=lambda case: case.name)
def test_flashinfer_plain(case: Case) -> None:
    assert run_case(partial(create_backend, "flashinfer"), case, device="cuda").refused is None


@pytest.mark.parametrize("case", OTHER_ON_FLASHINFER, ids=lambda case: case.name)
def test_flashinfer_variants(case: Case) -> None:
    assert run_case(partial(create_backend, "flashinfer"), case, device="cuda").refused is None


def test_flashinfer_refuses_sinks_and_auto_does_not() -> None:
    case = replace(BY_NAME["mixed-sinks"], dtype=torch.bfloat16)
    refused = run_case(partial(create_backend, "flashinfer"), case, device="cuda").refused
    assert refused is not None
    assert "attention sinks; served are layers without them" in refused
    assert run_case(partial(create_backend, "auto"), case, device="cuda").refused is None


def test_flashinfer_refuses_kv_cache_groups_and_auto_does_not() -> None:
    case = replace(BY_NAME["mixed-kvgroups"], dtype=torch.bfloat16)
    refused = run_case(partial(create_backend, "flashinfer"), case, device="cuda").refused
    assert refused is not None
    assert "page tables per KV cache group; served is one table for all layers" in refused
    assert run_case(partial(create_backend, "auto"), case, device="cuda").refused is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["torch", "triton", "flashinfer"])
def test_offsets_beyond_int32(backend: str, dtype: torch.dtype) -> None:
    check_large_cache(partial(create_backend, backend), device="cuda", dtype=dtype)
