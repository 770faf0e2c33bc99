"""Every backend passes the conformance suite on a CUDA device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from xllm_attention import create_backend
from xllm_attention.conformance import CASES, Case, check_large_cache, run_case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_table(backend: str, case: Case) -> None:
    assert run_case(partial(create_backend, backend), case, device="cuda").refused is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_table_in_bfloat16(case: Case) -> None:
    assert run_case(partial(create_backend, "triton"), replace(case, dtype=torch.bfloat16), device="cuda").refused is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_offsets_beyond_int32(backend: str, dtype: torch.dtype) -> None:
    check_large_cache(partial(create_backend, backend), device="cuda", dtype=dtype)
