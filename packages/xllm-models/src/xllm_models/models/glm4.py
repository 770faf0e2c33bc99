"""GLM-4 (dense), after HF transformers' Glm4ForCausalLM: norms before and after each block.

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
    GatedMLP,
    ParallelLMHead,
    QKVParallelLinear,
    ResidualRMSNorm,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
)
from ..loading import WeightMap


class Glm4Attention(nn.Module):
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
        self.o_proj = RowParallelLinear(config.num_heads * config.head_dim, config.hidden_size, tp=tp)
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
        q, k = self.rotary_emb(positions, q, k)
        out: torch.Tensor = self.o_proj(self.attn(q, k, v).flatten(1))
        return out


class Glm4DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, tp: TensorParallel) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = ResidualRMSNorm(size, eps)
        self.self_attn = Glm4Attention(config, layer_id, rotary_emb, tp)
        self.post_self_attn_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = ResidualRMSNorm(size, eps)
        self.mlp = GatedMLP(size, config.intermediate_size, hidden_act=config.hidden_act, tp=tp)
        self.post_mlp_layernorm = RMSNorm(size, eps)

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.post_self_attn_layernorm(self.self_attn(positions, hidden))
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.post_mlp_layernorm(self.mlp(hidden)), residual


class Glm4Model(nn.Module):
    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp=tp)
        rotary_emb = RotaryEmbedding(config.rope, config.head_dim, config.num_positions, interleaved=True)
        self.layers = nn.ModuleList(
            Glm4DecoderLayer(config, layer_id, rotary_emb, tp) for layer_id in range(config.num_layers)
        )
        self.norm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed_tokens(input_ids)  # [T, hidden]
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class Glm4ForCausalLM(CausalLM):
    weight_map = WeightMap(
        fused={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
        tied={"lm_head.weight": "model.embed_tokens.weight"},
    )

    optional_keys = ("attention_bias", "hidden_act", "partial_rotary_factor")
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    }

    def build(self, config: ModelConfig, tp: TensorParallel) -> None:
        self.model = Glm4Model(config, tp)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tied=tied, tp=tp)
