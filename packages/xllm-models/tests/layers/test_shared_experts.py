"""`SharedExpertsMoE` with each grouped router against the block of transformers' model."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from xllm_models import ModelConfig, TensorParallel
from xllm_models.layers import GROUPED_ROUTING, GroupedSigmoidRouter, GroupedSoftmaxRouter, SharedExpertsMoE

SIZES: dict[str, Any] = {
    "vocab_size": 9, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 8, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12,
    "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip
OWN = {**GROUPED_ROUTING, "topk_method": "greedy", "n_shared_experts": 1}
CASES: dict[str, tuple[str, str, type[nn.Module], dict[str, Any]]] = {
    "deepseek_v2": (
        "deepseek_v2",
        "DeepseekV2Moe",
        GroupedSoftmaxRouter,
        {"topk_method": "group_limited_greedy", "mlp_bias": True},
    ),
    "deepseek_v2 greedy": ("deepseek_v2", "DeepseekV2Moe", GroupedSoftmaxRouter, {"topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3MoE", GroupedSigmoidRouter, {"norm_topk_prob": True}),
    "glm4_moe": ("glm4_moe", "Glm4MoeMoE", GroupedSigmoidRouter, {"norm_topk_prob": False}),
}


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_block_equals_hf(case: str) -> None:
    torch.manual_seed(0)
    family, name, router, keys = CASES[case]
    modeling: Any = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    hf_config = AutoConfig.for_model(family, **SIZES, **keys)
    hf_config._experts_implementation = "eager"
    theirs = getattr(modeling, name)(hf_config)
    for tensor in (*theirs.parameters(), *theirs.buffers()):
        tensor.copy_(torch.randn_like(tensor) * 0.3)
    config = ModelConfig.from_dict({"model_type": family} | SIZES | keys, own=OWN)
    ours = SharedExpertsMoE(config, router(config), TensorParallel())
    state = theirs.state_dict()
    state["experts.gate_up"] = state.pop("experts.gate_up_proj")
    state["experts.down"] = state.pop("experts.down_proj")
    for end in ("weight", "bias"):
        if f"shared_experts.up_proj.{end}" in state:
            parts = [state.pop(f"shared_experts.{one}_proj.{end}") for one in ("gate", "up")]
            state[f"shared_experts.gate_up_proj.{end}"] = torch.cat(parts)
    ours.load_state_dict(state)
    x = torch.randn(17, 24)
    want = theirs(x[None])[0]
    torch.testing.assert_close(ours(x), want, rtol=1e-5, atol=1e-5)


def test_a_config_without_experts_is_refused() -> None:
    config = ModelConfig.from_dict({"model_type": "other"} | SIZES | {"n_routed_experts": 0}, own=OWN)
    with pytest.raises(ValueError, match="the config of other has no experts"):
        SharedExpertsMoE(config, nn.Identity(), TensorParallel())
