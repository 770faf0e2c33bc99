"""A model knows whether its weights are set: it gives no logits before that, nor after a load that failed half-way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from xllm_models import CausalLM, DictStateDict, get_model_class
from xllm_models.loading import WeightError

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
HIDDEN = torch.ones(2, 16)
REFUSAL = r"LlamaForCausalLM has no loaded weights: call load_weights.* set weights_loaded = True"


@pytest.fixture
def model() -> CausalLM:
    return get_model_class("llama")(CONFIG)


def checkpoint() -> dict[str, torch.Tensor]:
    tensors = {"model.embed_tokens.weight": (48, 16), "model.norm.weight": (16,), "lm_head.weight": (48, 16)}
    for layer in ("model.layers.0.", "model.layers.1."):
        tensors |= {
            layer + "input_layernorm.weight": (16,),
            layer + "post_attention_layernorm.weight": (16,),
            layer + "self_attn.q_proj.weight": (16, 16),
            layer + "self_attn.k_proj.weight": (8, 16),
            layer + "self_attn.v_proj.weight": (8, 16),
            layer + "self_attn.o_proj.weight": (16, 16),
            layer + "mlp.gate_proj.weight": (24, 16),
            layer + "mlp.up_proj.weight": (24, 16),
            layer + "mlp.down_proj.weight": (16, 24),
        }
    return {name: torch.ones(shape) for name, shape in tensors.items()}


class FailingStateDict(DictStateDict):
    """Fails when the tensors are read a second time: after the checks, while they are copied."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.is_broken = False

    def get_tensor(self, name: str) -> torch.Tensor:
        if self.is_broken and name == "model.norm.weight":
            raise OSError("the file is gone")
        return super().get_tensor(name)


def test_a_model_without_weights_gives_no_logits(model: CausalLM) -> None:
    assert not model.weights_loaded
    with pytest.raises(RuntimeError, match=REFUSAL):
        model.compute_logits(HIDDEN)
    model.load_weights([DictStateDict(checkpoint())])
    assert model.weights_loaded
    assert model.compute_logits(HIDDEN).shape == (2, 48)


def test_a_load_that_is_refused_before_it_writes_leaves_the_model_as_it_was(model: CausalLM) -> None:
    partial = checkpoint()
    del partial["model.norm.weight"]
    with pytest.raises(WeightError, match=r"missing: model\.norm\.weight"):
        model.load_weights([DictStateDict(partial)])
    assert not model.weights_loaded
    model.load_weights([DictStateDict(checkpoint())])
    with pytest.raises(WeightError, match=r"missing: model\.norm\.weight"):
        model.load_weights([DictStateDict(partial)])
    assert model.weights_loaded


def test_a_load_that_fails_leaves_no_loaded_weights(model: CausalLM) -> None:
    tensors = FailingStateDict(checkpoint())
    model.load_weights([tensors])
    tensors.is_broken = True
    with pytest.raises(OSError, match="the file is gone"):
        model.load_weights([tensors])
    assert not model.weights_loaded
    with pytest.raises(RuntimeError, match=REFUSAL):
        model.compute_logits(HIDDEN)


def test_parameters_that_the_caller_fills_are_declared(model: CausalLM) -> None:
    for parameter in model.parameters():
        parameter.fill_(0.5)
    model.weights_loaded = True
    assert model.compute_logits(HIDDEN).shape == (2, 48)
