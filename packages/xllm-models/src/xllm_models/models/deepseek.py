"""DeepSeek-V2 and V3, after HF transformers' DeepseekV2ForCausalLM and DeepseekV3ForCausalLM."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ..causal_lm import CausalLM
from ..config import ROUTED_EXPERT_KEYS, ModelConfig
from ..layers import (
    GROUPED_ROUTING,
    LATENT_ATTENTION,
    GatedMLP,
    GroupedSigmoidRouter,
    GroupedSoftmaxRouter,
    LatentAttention,
    ParallelLMHead,
    ResidualRMSNorm,
    RotaryEmbedding,
    SharedExpertsMoE,
    TensorParallel,
    VocabParallelEmbedding,
)
from ..loading import WeightMap

Router = type[GroupedSoftmaxRouter] | type[GroupedSigmoidRouter]


class DeepseekDecoderLayer(nn.Module):
    def __init__(
        self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, router: Router, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.input_layernorm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, tp=tp)
        self.self_attn = LatentAttention(config, layer_id, rotary_emb, tp)
        self.post_attention_layernorm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, tp=tp)
        self.mlp: nn.Module
        if layer_id >= config.own["first_k_dense_replace"]:
            self.mlp = SharedExpertsMoE(config, router(config), tp)
        else:
            size, act = config.hidden_size, config.hidden_act
            self.mlp = GatedMLP(
                size, config.intermediate_size, hidden_act=act, bias=config.mlp_bias, reduce_results=False, tp=tp
            )

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class DeepseekModel(nn.Module):
    def __init__(self, config: ModelConfig, router: Router, tp: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp=tp)
        interleaved = config.own.get("rope_interleave", True)
        rotary_emb = RotaryEmbedding(config.rope, config.head_dim, config.num_positions, interleaved=interleaved)
        self.layers = nn.ModuleList(
            DeepseekDecoderLayer(config, layer_id, rotary_emb, router, tp) for layer_id in range(config.num_layers)
        )
        self.norm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, tp=tp)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed_tokens(input_ids)  # [T, hidden]
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class DeepseekV2ForCausalLM(CausalLM):
    router: ClassVar[Router] = GroupedSoftmaxRouter
    weight_map = WeightMap(
        fused={"gate_up_proj": ("gate_proj", "up_proj")},
        stacked={
            "experts.gate_up": ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight"),
            "experts.down": ("experts.{}.down_proj.weight",),
        },
        prestacked={"experts.gate_up": ("experts.gate_up_proj",), "experts.down": ("experts.down_proj",)},
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        ignored=("model.layers.{num_layers}.*",),  # V3's multi-token prediction layer
    )
    optional_keys: ClassVar[Collection[str] | None] = (
        *("num_experts", "attention_bias", "mlp_bias", "hidden_act", "n_routed_experts", "num_experts_per_tok"),
        *("moe_intermediate_size", "norm_topk_prob"),
    )
    config_defaults: ClassVar[Mapping[str, Any]] = {"n_routed_experts": 64, "moe_intermediate_size": 1407}
    own_config: ClassVar[Mapping[str, Any]] = {
        **GROUPED_ROUTING,
        **LATENT_ATTENTION,
        "topk_method": "greedy",
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
    }
    compare_names: ClassVar[Mapping[str, str | None]] = dict.fromkeys(  # per head in transformers: the expanded form
        ("self_attn.attn", "self_attn.attn.q", "self_attn.attn.k")
    )
    fixed_keys: ClassVar[Mapping[str, Any]] = {"moe_layer_freq": 1, "scoring_func": "softmax"}  # all served

    @classmethod
    def parse_config(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """`CausalLM.parse_config`. ValueError also for a value that transformers ignores and DeepSeek's code reads."""
        for key, only in cls.fixed_keys.items():
            if raw.get(key, only) not in (None, only):
                raise ValueError(f"{key} {raw[key]!r} is not supported; allowed: {only!r}")
        if raw.get("n_layers") is not None:
            return super().parse_config(raw)
        own = {**cls.own_config, **raw}
        return super().parse_config(
            {**raw, "q_lora_rank": own["q_lora_rank"] or 0, "head_dim": own["qk_rope_head_dim"]}
        )

    def build(self, config: ModelConfig, tp: TensorParallel) -> None:
        self.model = DeepseekModel(config, self.router, tp)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tied=tied, tp=tp)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    router: ClassVar[Router] = GroupedSigmoidRouter
    optional_keys: ClassVar[Collection[str] | None] = ("attention_bias", "hidden_act", *ROUTED_EXPERT_KEYS)
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "norm_topk_prob": True,
    }
    own_config: ClassVar[Mapping[str, Any]] = {
        **{key: value for key, value in DeepseekV2ForCausalLM.own_config.items() if key != "topk_method"},
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "rope_interleave": True,
    }
    fixed_keys: ClassVar[Mapping[str, Any]] = {
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
