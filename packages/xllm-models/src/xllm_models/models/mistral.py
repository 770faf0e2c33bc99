"""Mistral, after HF transformers' MistralForCausalLM: Llama with windows and no biases.

Also Ministral, whose `layer_types` name the layers with a window, and the text model of Mistral 3.

T tokens of the step, H query heads, K kv heads, D head dim. Heads are those of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from xllm_attention import Attention, AttentionSpec

from ..causal_lm import CausalLM
from ..config import TEXT_MODEL_TYPE, ModelConfig, text_config
from ..layers import (
    GatedMLP,
    ParallelLMHead,
    QKVParallelLinear,
    ResidualRMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
)
from ..loading import WeightMap


class MistralAttention(nn.Module):
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
            sliding_window=config.window(layer_id),
        )
        self.attn = Attention(spec, layer_id)

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(hidden)  # [T, H, D], [T, K, D], [T, K, D]
        q, k = self.rotary_emb(positions, q, k)
        out: torch.Tensor = self.o_proj(self.attn(q, k, v).flatten(1))
        return out


class MistralDecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, tp: TensorParallel) -> None:
        super().__init__()
        self.input_layernorm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, tp=tp)
        self.self_attn = MistralAttention(config, layer_id, rotary_emb, tp)
        self.post_attention_layernorm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, tp=tp)
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


class MistralModel(nn.Module):
    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp=tp)
        rotary_emb = RotaryEmbedding(config.rope, config.head_dim, config.num_positions)
        self.layers = nn.ModuleList(
            MistralDecoderLayer(config, layer_id, rotary_emb, tp) for layer_id in range(config.num_layers)
        )
        self.norm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, tp=tp)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed_tokens(input_ids)  # [T, hidden]
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class MistralForCausalLM(CausalLM):
    weight_map = WeightMap(
        prefix=("language_model.", "model.language_model."),
        fused={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        ignored=("*vision_tower.*", "*multi_modal_projector.*"),
    )

    text_model_types = ("mistral",)
    optional_keys = ("sliding_window", "layer_types", "hidden_act")
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    }

    @classmethod
    def parse_config(cls, raw: Mapping[str, Any]) -> ModelConfig:
        raw = text_config(raw)
        # transformers loads a Mistral with layer_types as Ministral, but not one that is nested in Mistral 3.
        if raw.get(TEXT_MODEL_TYPE) is not None and raw.get("layer_types"):
            raise ValueError(f"layer_types {raw['layer_types']!r} in text_config is not supported; it must be absent")
        return super().parse_config(raw)

    def build(self, config: ModelConfig, tp: TensorParallel) -> None:
        self.model = MistralModel(config, tp)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tied=tied, tp=tp)
