"""A model without loaded weights is refused at the first use of an executor, with every kind of runner."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from xllm_executor import ModelExecutor
from xllm_metadata import build_attention_metadata
from xllm_models import CausalLM

Caches = Callable[[CausalLM], list[tuple[torch.Tensor, torch.Tensor]]]
REFUSAL = "LlamaForCausalLM has no loaded weights: call load_weights"
IDS = torch.zeros(1, dtype=torch.int32)
DECODE = build_attention_metadata([1], [1], [[0]], page_size=4)


@pytest.mark.parametrize("backend", ["off", "recorded", "eager"])
def test_an_unloaded_model_is_refused_until_its_weights_are_set(
    backend: str, unloaded_model: CausalLM, make_caches: Caches
) -> None:
    model = unloaded_model
    options = {"python_graph_backend": backend, "max_tokens_per_batch": 4, "max_model_len": 16}
    executor = ModelExecutor(model, options, 2)
    executor.bind_kv_caches(make_caches(model))  # may come before the weights
    for _ in range(2):
        with pytest.raises(RuntimeError, match=REFUSAL):
            executor.warmup()
        with pytest.raises(RuntimeError, match=REFUSAL):
            executor.execute(IDS, IDS, DECODE)
        with pytest.raises(RuntimeError, match=REFUSAL):
            executor.execute(IDS, IDS, DECODE, IDS)
        with pytest.raises(RuntimeError, match=REFUSAL):
            executor.runners.warmup()
    for parameter in model.parameters():
        parameter.fill_(0.1)
    model.weights_loaded = True
    executor.warmup()
    assert executor.execute(IDS, IDS, DECODE, IDS).shape == (1, 97)
