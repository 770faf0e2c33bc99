"""A tiny Llama with random weights, and batches for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from xllm_metadata import allocate_caches
from xllm_models import CausalLM, get_model_class

CONFIG = {
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "n_layers": 28,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


@pytest.fixture
def model() -> CausalLM:
    torch.manual_seed(0)
    model = get_model_class("llama")(CONFIG)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.weights_loaded = True
    return model


@pytest.fixture
def small_model() -> CausalLM:
    """The same with two layers, for tests that capture many graphs."""
    torch.manual_seed(0)
    model = get_model_class("llama")(CONFIG | {"n_layers": 2})
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.weights_loaded = True
    return model


@pytest.fixture
def unloaded_model() -> CausalLM:
    """Two layers whose weights are not set."""
    return get_model_class("llama")(CONFIG | {"n_layers": 2})


@pytest.fixture
def make_caches() -> Callable[[CausalLM], list[tuple[torch.Tensor, ...]]]:
    """KV caches of 16 pages of 4 tokens, poisoned: an unwritten slot that is read shows as NaN."""

    def make(model: CausalLM) -> list[tuple[torch.Tensor, ...]]:
        caches = allocate_caches(model.cache_specs, num_pages=16, page_size=4, fill=torch.nan)
        return [tuple(tensor for _, tensor in cache.items()) for cache in caches]

    return make


@pytest.fixture(autouse=True)
def _no_validation_from_outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests switch validation on themselves where they mean it."""
    monkeypatch.delenv("XLLM_VALIDATE", raising=False)
    return
