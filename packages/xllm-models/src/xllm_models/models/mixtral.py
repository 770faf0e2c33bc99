"""Mixtral, after HF transformers' MixtralForCausalLM: Mistral whose layers are mixtures of experts.

T tokens of the step, H query heads, K kv heads, D head dim. Heads are those of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from xllm_attention import Attention, AttentionSpec

from ..causal_lm import CausalLM
from ..config import ModelConfig
from ..layers import (
    ParallelLMHead,
    QKVParallelLinear,
    ResidualRMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    SparseMoE,
    TensorParallel,
    VocabParallelEmbedding,
)
from ..loading import WeightMap


class MixtralAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, tp: TensorParallel) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads, tp=tp
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim, config.hidden_size, reduce_results=False, tp=tp
        )
        self.rotary_emb = rotary_emb
        spec = AttentionSpec(
            num_heads=self.qkv_proj.num_heads,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            sliding_window=config.sliding_window,
        )
        self.attn = Attention(spec, layer_id)

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(hidden)  # [T, H, D], [T, K, D], [T, K, D]
        q, k = self.rotary_emb(positions, q, k)
        out: torch.Tensor = self.o_proj(self.attn(q, k, v).flatten(1))
        return out


class MixtralDecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, tp: TensorParallel) -> None:
        super().__init__()
        if config.moe is None:
            raise ValueError("the config of a Mixtral model has no num_local_experts")
        self.input_layernorm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, tp=tp)
        self.self_attn = MixtralAttention(config, layer_id, rotary_emb, tp)
        self.post_attention_layernorm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, tp=tp)
        self.mlp = SparseMoE(config.hidden_size, config.moe, hidden_act=config.hidden_act, reduce_results=False, tp=tp)

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class MixtralModel(nn.Module):
    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp=tp)
        rotary_emb = RotaryEmbedding(config.rope, config.head_dim, config.num_positions)
        self.layers = nn.ModuleList(
            MixtralDecoderLayer(config, layer_id, rotary_emb, tp) for layer_id in range(config.num_layers)
        )
        self.norm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, tp=tp)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed_tokens(input_ids)  # [T, hidden]
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class MixtralForCausalLM(CausalLM):
    weight_map = WeightMap(
        fused={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
        renamed={"block_sparse_moe": "mlp"},
        stacked={
            "experts.gate_up": ("experts.{}.w1.weight", "experts.{}.w3.weight"),
            "experts.down": ("experts.{}.w2.weight",),
        },
        prestacked={"experts.gate_up": ("experts.gate_up_proj",), "experts.down": ("experts.down_proj",)},
        tied={"lm_head.weight": "model.embed_tokens.weight"},
    )

    # The experts' size is intermediate_size, and the weights of a token's experts always sum to 1.
    optional_keys = ("sliding_window", "hidden_act", "num_experts", "num_local_experts", "num_experts_per_tok")
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }

    def build(self, config: ModelConfig, tp: TensorParallel) -> None:
        self.model = MixtralModel(config, tp)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tied=tied, tp=tp)
