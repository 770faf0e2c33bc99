"""The torch backend passes the conformance suite, table and random batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from xllm_attention.conformance import CASES, BackendFactory, Case, check_large_cache, run_case
from xllm_attention.conformance.strategies import cases

# The fixture is a function that holds no state.
_SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_table(torch_factory: BackendFactory, case: Case) -> None:
    assert run_case(torch_factory, case).refused is None


@given(
    case=cases(
        dtypes=(torch.float32, torch.float16, torch.bfloat16, torch.float64),
        v_head_dims=True,
        latent=True,
        fp8=True,
        kv_groups=True,
    )
)
@_SETTINGS
def test_random_batches(torch_factory: BackendFactory, case: Case) -> None:
    assert run_case(torch_factory, case).refused is None


@given(case=cases(graph=True, v_head_dims=True, latent=True, fp8=True, kv_groups=True))
@_SETTINGS
def test_random_graph_decode(torch_factory: BackendFactory, case: Case) -> None:
    assert run_case(torch_factory, case).refused is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_offsets_beyond_int32(torch_factory: BackendFactory, dtype: torch.dtype) -> None:
    check_large_cache(torch_factory, dtype=dtype)


def test_the_table_covers_what_it_should() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.page_size for case in CASES} >= {1, 16, 128}
    assert {case.head_dim for case in CASES} >= {64, 80, 96, 128, 256}
    assert {case.num_heads // case.num_kv_heads for case in CASES} >= set(range(1, 9))
    assert {case.dtype for case in CASES} >= {torch.float32, torch.float16, torch.bfloat16}
    assert {(case.head_dim, case.v_head_dim) for case in CASES if case.latent} >= {(576, 512), (24, 16)}
    assert {(case.head_dim, case.v_head_dim) for case in CASES if not case.latent} >= {(192, 128), (64, 128)}
    assert {window for case in CASES if case.page_size == 16 for window in case.windows} >= {0, 1, 2, 15, 16, 17}


@pytest.mark.parametrize(
    ("prefix_lens", "step"), [((3,), ((0, 1), (0, 2))), ((3,), ((1, 1),)), ((3,), ((-1, 1), (0, 2)))]
)
def test_a_case_that_means_nothing_is_refused(prefix_lens: tuple[int], step: tuple[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="step 0 of case 'x'"):
        Case(name="x", prefix_lens=prefix_lens, steps=(step,))
