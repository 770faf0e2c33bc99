"""Steps of a model with layers that keep a state: slots are checked, and a warm-up writes none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from xllm_executor import ModelExecutor
from xllm_metadata import CacheKind, allocate_caches, build_attention_metadata
from xllm_models import CausalLM, get_model_class

NUM_SLOTS = 4
CONFIG = {
    "model_type": "qwen3_5_text", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"], "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> CausalLM:
    """Random weights."""
    torch.manual_seed(3)
    made = get_model_class("qwen3_5_text")(CONFIG, dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
    made.weights_loaded = True
    return made


def make(model: CausalLM, **config: object) -> tuple[ModelExecutor, list[torch.Tensor]]:
    """An executor with graphs, warmed up, and its state tensors."""
    executor = ModelExecutor(model, {"python_graph_backend": "recorded", "max_tokens_per_batch": 16, **config}, 4)
    sizes = {"num_pages": 16, "page_size": 4, "num_slots": NUM_SLOTS}
    caches = allocate_caches(model.cache_specs, **sizes, fill=torch.nan)
    executor.bind_kv_caches(caches)
    executor.warmup()
    return executor, [tensor for cache in caches for tensor in cache.of_kind(CacheKind.STATE)]


def run(executor: ModelExecutor, q_len: int, kv_len: int, slot: int, **changes: object) -> torch.Tensor:
    """Hidden states of one step of a sequence."""
    step = build_attention_metadata([q_len], [kv_len], [[3, 4, 5]], page_size=4, state_slots=[slot])
    tokens = torch.arange(kv_len - q_len, kv_len, dtype=torch.int32)
    return executor.execute(tokens, tokens, replace(step, **changes)).clone()


def test_the_warm_up_writes_no_state(model: CausalLM) -> None:
    _, states = make(model)
    assert all(bool(tensor.isnan().all()) for tensor in states)


def test_a_slot_is_a_sequence_s_own(model: CausalLM) -> None:
    executor, states = make(model)
    run(executor, 5, 5, slot=2)
    first = run(executor, 1, 6, slot=2)
    for tensor in states:
        assert [bool(tensor[slot].isnan().any()) for slot in range(NUM_SLOTS)] == [True, True, False, True]
    again, _ = make(model)
    torch.testing.assert_close(first[-1], run(again, 6, 6, slot=0)[-1], rtol=1e-4, atol=1e-5)
    assert executor.stats()["steps"] == {"piecewise": 1, "decode_graph": 1}


@pytest.mark.parametrize("q_len", [1, 5])
def test_a_step_without_slots_is_refused_by_name(model: CausalLM, q_len: int) -> None:
    executor, _ = make(model)
    message = "linear_state_indices is None; every step of a model with state layers must have it"
    with pytest.raises(ValueError, match=message):
        run(executor, q_len, q_len, 0, linear_state_indices=None)
    assert bool(run(executor, q_len, q_len, 0).isfinite().all())


def test_a_slot_beyond_the_state_tensors_is_found_by_validate(model: CausalLM) -> None:
    executor, _ = make(model, validate=True)
    with pytest.raises(ValueError, match=r"linear_state_indices\[0\] is 4; it must be -1 or 0 to 3"):
        run(executor, 5, 5, slot=NUM_SLOTS)
