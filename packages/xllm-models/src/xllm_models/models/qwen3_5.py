"""Qwen3.5 text models, after HF transformers' Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM.

Qwen3-Next with other input projections of the linear attention; dense, or with experts in every layer. T tokens of the
step, Hv value heads of linear attention on this rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch

from ..config import ModelConfig, text_config, without_mrope
from ..layers import GatedDeltaNet, MergedColumnParallelLinear, TensorParallel
from ..loading import WeightMap
from .qwen3_next import Qwen3NextDecoderLayer, Qwen3NextForCausalLM

_OPTIONAL_KEYS = ("attention_bias", "hidden_act", "partial_rotary_factor", "layer_types")


class Qwen3_5GatedDeltaNet(GatedDeltaNet):
    def __init__(self, config: ModelConfig, layer_id: int, tp: TensorParallel) -> None:
        super().__init__(config, layer_id, tp)
        own = config.own
        keys = own["linear_num_key_heads"] * own["linear_key_head_dim"]
        num_value_heads = own["linear_num_value_heads"]
        values = num_value_heads * own["linear_value_head_dim"]
        self.in_proj_qkv = MergedColumnParallelLinear(config.hidden_size, [keys, keys, values], tp=tp)
        self.in_proj_zba = MergedColumnParallelLinear(
            config.hidden_size, [values, num_value_heads, num_value_heads], tp=tp
        )

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, head_dim = self.spec.num_v_heads, self.spec.head_v_dim
        z, b, a = torch.split(self.in_proj_zba(x), [heads * head_dim, heads, heads], dim=1)
        return self.in_proj_qkv(x), z.view(-1, heads, head_dim), b, a


class Qwen3_5DecoderLayer(Qwen3NextDecoderLayer):
    delta_net = Qwen3_5GatedDeltaNet


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    weight_map = WeightMap(
        prefix=("language_model.", "model.language_model."),
        fused={
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "gate_up_proj": ("gate_proj", "up_proj"),
            "in_proj_zba": ("in_proj_z", "in_proj_b", "in_proj_a"),
        },
        stacked=Qwen3NextForCausalLM.weight_map.stacked,
        prestacked=Qwen3NextForCausalLM.weight_map.prestacked,
        tied=Qwen3NextForCausalLM.weight_map.tied,
        ignored=("mtp.*", "visual.*", "model.visual.*"),
    )

    layer_class = Qwen3_5DecoderLayer
    text_model_types = ("qwen3_5_text",)
    optional_keys: ClassVar[Collection[str] | None] = _OPTIONAL_KEYS
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
    }
    own_config: ClassVar[Mapping[str, Any]] = {
        name: value
        for name, value in Qwen3NextForCausalLM.own_config.items()
        if name != "shared_expert_intermediate_size"
    }

    @classmethod
    def parse_config(cls, raw: Mapping[str, Any]) -> ModelConfig:
        return super().parse_config(without_mrope(text_config(raw)))


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    text_model_types = ("qwen3_5_moe_text",)
    optional_keys = (
        *_OPTIONAL_KEYS,
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
    )
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "intermediate_size": 1,  # no layer is dense, and config.json has no such key
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    }
    own_config: ClassVar[Mapping[str, Any]] = Qwen3NextForCausalLM.own_config
