"""Fixtures that the tests of several modules share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch

from xllm_attention import AttentionBackend, AttentionSpec, BackendLimits, create_backend
from xllm_attention.conformance import BackendFactory
from xllm_metadata import LayerCache, allocate_caches

MakeBackend = Callable[..., AttentionBackend]
LIMITS = BackendLimits(
    device=torch.device("cpu"), dtype=torch.float32, max_num_seqs=8, max_num_tokens=64, max_model_len=40
)
GPU_ASKED_FOR = os.environ.get("XLLM_GPU_TESTS") == "1"
if not GPU_ASKED_FOR:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined, which no module has done yet


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu run only where XLLM_GPU_TESTS=1 asks for them."""
    if GPU_ASKED_FOR:
        return
    deselected = [item for item in items if item.get_closest_marker("gpu")]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A GPU run without a GPU fails; it does not skip."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.fail("XLLM_GPU_TESTS=1 asks for the GPU tests, and torch finds no CUDA device")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def torch_factory() -> BackendFactory:
    """Makes the torch backend as the conformance suite asks for it."""
    return partial(create_backend, "torch")


@pytest.fixture
def make_caches() -> Callable[..., list[LayerCache]]:
    """Makes a zeroed cache for each spec."""

    def make(
        specs: Sequence[AttentionSpec],
        *,
        num_pages: int = 32,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
    ) -> list[LayerCache]:
        return allocate_caches([spec.cache_specs(dtype) for spec in specs], num_pages=num_pages, page_size=page_size)

    return make


@pytest.fixture
def make_backend(make_caches: Callable[..., list[LayerCache]]) -> MakeBackend:
    """Makes a torch backend with bound fp32 caches of 32 pages of 4."""

    def make(
        specs: Sequence[AttentionSpec],
        *,
        bind: bool = True,
        limits: BackendLimits = LIMITS,
    ) -> AttentionBackend:
        backend = create_backend("torch", specs, limits)
        if bind:
            backend.bind_kv_caches(make_caches(specs))
        return backend

    return make


@pytest.fixture
def spec() -> AttentionSpec:
    """A small spec with grouped heads."""
    return AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=8, scale=8**-0.5)
