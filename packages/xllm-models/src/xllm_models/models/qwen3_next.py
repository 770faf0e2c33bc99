"""Qwen3-Next, after HF transformers' Qwen3NextForCausalLM: linear attention in most layers, gated attention in others.

A shared expert with a gate of its own is added to the chosen experts. T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ..causal_lm import CausalLM
from ..config import FULL, LINEAR, ModelConfig, with_linear_layers
from ..layers import (
    GatedAttention,
    GatedMLP,
    GatedSharedExpertMoE,
    GroupedGatedDeltaNet,
    ParallelLMHead,
    ResidualRMSNorm,
    RotaryEmbedding,
    TensorParallel,
    VocabParallelEmbedding,
)
from ..loading import WeightMap


class Qwen3NextDecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, tp: TensorParallel) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = ResidualRMSNorm(size, eps, unit_offset=True, tp=tp)
        self.is_linear = config.layer_types[layer_id] == LINEAR
        if self.is_linear:
            self.linear_attn = GroupedGatedDeltaNet(config, layer_id, tp)
        else:
            self.self_attn = GatedAttention(config, layer_id, rotary_emb, tp)
        self.post_attention_layernorm = ResidualRMSNorm(size, eps, unit_offset=True, tp=tp)
        self.mlp: nn.Module
        if config.moe is not None and config.moe.is_sparse(layer_id):
            self.mlp = GatedSharedExpertMoE(config, tp)
        else:
            act = config.hidden_act
            self.mlp = GatedMLP(size, config.intermediate_size, hidden_act=act, reduce_results=False, tp=tp)

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.linear_attn(hidden) if self.is_linear else self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class Qwen3NextModel(nn.Module):
    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp=tp)
        rotary_emb = RotaryEmbedding(config.rope, config.head_dim, config.num_positions)
        self.layers = nn.ModuleList(
            Qwen3NextDecoderLayer(config, layer_id, rotary_emb, tp) for layer_id in range(config.num_layers)
        )
        self.norm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, unit_offset=True, tp=tp)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed_tokens(input_ids)  # [T, hidden]
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class Qwen3NextForCausalLM(CausalLM):
    weight_map = WeightMap(
        fused={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        stacked={
            "experts.gate_up": ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight"),
            "experts.down": ("experts.{}.down_proj.weight",),
        },
        prestacked={"experts.gate_up": ("experts.gate_up_proj",), "experts.down": ("experts.down_proj",)},
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        ignored=("mtp.*",),  # the draft module
    )

    layer_types = (LINEAR, FULL)
    optional_keys = (
        *("attention_bias", "hidden_act", "partial_rotary_factor", "layer_types"),
        *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
        *("decoder_sparse_step", "mlp_only_layers"),
    )
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    }
    own_config: ClassVar[Mapping[str, Any]] = {
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "shared_expert_intermediate_size": 512,
    }

    @classmethod
    def parse_config(cls, raw: Mapping[str, Any]) -> ModelConfig:
        return super().parse_config(with_linear_layers(raw))

    def build(self, config: ModelConfig, tp: TensorParallel) -> None:
        self.model = Qwen3NextModel(config, tp)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tied=tied, tp=tp)
