"""GLM-4-MoE (GLM-4.5), after HF transformers' Glm4MoeForCausalLM: experts by sigmoid scores, and a shared expert.

T tokens of the step, H query heads, K kv heads, D head dim. Heads are those of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from xllm_attention import Attention, AttentionSpec

from ..causal_lm import CausalLM
from ..config import ROUTED_EXPERT_KEYS, ModelConfig
from ..layers import (
    GROUPED_ROUTING,
    GatedMLP,
    GroupedSigmoidRouter,
    ParallelLMHead,
    QKVParallelLinear,
    ResidualRMSNorm,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    SharedExpertsMoE,
    TensorParallel,
    VocabParallelEmbedding,
)
from ..loading import WeightMap


class Glm4MoeAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, tp: TensorParallel) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_heads,
            config.num_kv_heads,
            bias=config.attention_bias,
            tp=tp,
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim, config.hidden_size, reduce_results=False, tp=tp
        )
        self.use_qk_norm = config.own["use_qk_norm"]
        if self.use_qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.rotary_emb = rotary_emb
        spec = AttentionSpec(
            num_heads=self.qkv_proj.num_heads,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
        )
        self.attn = Attention(spec, layer_id)

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(hidden)  # [T, H, D], [T, K, D], [T, K, D]
        q, k = self.rotary_emb(positions, q, k, (self.q_norm, self.k_norm) if self.use_qk_norm else None)
        out: torch.Tensor = self.o_proj(self.attn(q, k, v).flatten(1))
        return out


class Glm4MoeDecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, tp: TensorParallel) -> None:
        super().__init__()
        self.input_layernorm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, tp=tp)
        self.self_attn = Glm4MoeAttention(config, layer_id, rotary_emb, tp)
        self.post_attention_layernorm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, tp=tp)
        self.mlp: nn.Module
        if layer_id >= config.own["first_k_dense_replace"]:
            self.mlp = SharedExpertsMoE(config, GroupedSigmoidRouter(config), tp)
        else:
            self.mlp = GatedMLP(
                config.hidden_size, config.intermediate_size, hidden_act=config.hidden_act, reduce_results=False, tp=tp
            )

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class Glm4MoeModel(nn.Module):
    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp=tp)
        rotary_emb = RotaryEmbedding(config.rope, config.head_dim, config.num_positions)
        self.layers = nn.ModuleList(
            Glm4MoeDecoderLayer(config, layer_id, rotary_emb, tp) for layer_id in range(config.num_layers)
        )
        self.norm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, tp=tp)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed_tokens(input_ids)  # [T, hidden]
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class Glm4MoeForCausalLM(CausalLM):
    weight_map = WeightMap(
        fused={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        stacked={
            "experts.gate_up": ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight"),
            "experts.down": ("experts.{}.down_proj.weight",),
        },
        prestacked={"experts.gate_up": ("experts.gate_up_proj",), "experts.down": ("experts.down_proj",)},
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        ignored=("model.layers.{num_layers}.*",),  # the multi-token prediction layer
    )
    optional_keys = ("attention_bias", "hidden_act", "partial_rotary_factor", *ROUTED_EXPERT_KEYS)
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
    }
    own_config: ClassVar[Mapping[str, Any]] = {
        **GROUPED_ROUTING,
        "use_qk_norm": False,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    }

    def build(self, config: ModelConfig, tp: TensorParallel) -> None:
        self.model = Glm4MoeModel(config, tp)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tied=tied, tp=tp)
