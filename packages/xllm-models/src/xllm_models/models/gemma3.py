"""Gemma 3 (text), after HF transformers' Gemma3ForCausalLM: windows in most layers, norms before and after each block,
scaled embeddings.

T tokens of the step, H query heads, K kv heads, D head dim. Heads are those of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from xllm_attention import Attention, AttentionSpec

from ..causal_lm import CausalLM
from ..config import GEMMA_KEYS, ModelConfig
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


class Gemma3Attention(nn.Module):
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
            config.num_heads * config.head_dim, config.hidden_size, bias=config.attention_bias, tp=tp
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, unit_offset=True)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, unit_offset=True)
        self.rotary_emb = rotary_emb
        spec = AttentionSpec(
            num_heads=self.qkv_proj.num_heads,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            head_dim=config.head_dim,
            scale=(config.query_pre_attn_scalar or config.head_dim) ** -0.5,
            sliding_window=config.window(layer_id),
        )
        self.attn = Attention(spec, layer_id)

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(hidden)  # [T, H, D], [T, K, D], [T, K, D]
        q, k = self.rotary_emb(positions, q, k, (self.q_norm, self.k_norm))
        out: torch.Tensor = self.o_proj(self.attn(q, k, v).flatten(1))
        return out


class Gemma3DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, tp: TensorParallel) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = ResidualRMSNorm(size, eps, unit_offset=True)
        self.self_attn = Gemma3Attention(config, layer_id, rotary_emb, tp)
        self.post_attention_layernorm = RMSNorm(size, eps, unit_offset=True)
        self.pre_feedforward_layernorm = ResidualRMSNorm(size, eps, unit_offset=True)
        self.mlp = GatedMLP(size, config.intermediate_size, hidden_act=config.hidden_act, tp=tp)
        self.post_feedforward_layernorm = RMSNorm(size, eps, unit_offset=True)

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.post_attention_layernorm(self.self_attn(positions, hidden))
        hidden, residual = self.pre_feedforward_layernorm(hidden, residual)
        return self.post_feedforward_layernorm(self.mlp(hidden)), residual


class Gemma3Model(nn.Module):
    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, scale=config.hidden_size**0.5, tp=tp
        )
        full = RotaryEmbedding(config.rope, config.head_dim, config.num_positions)
        sliding = RotaryEmbedding(config.sliding_rope or config.rope, config.head_dim, config.num_positions)
        self.layers = nn.ModuleList(
            Gemma3DecoderLayer(config, layer_id, sliding if config.slides(layer_id) else full, tp)
            for layer_id in range(config.num_layers)
        )
        self.norm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, unit_offset=True)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed_tokens(input_ids)  # [T, hidden]
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class Gemma3ForCausalLM(CausalLM):
    weight_map = WeightMap(
        prefix=("language_model.", "model.language_model."),
        fused={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        ignored=("*vision_tower.*", "*multi_modal_projector.*"),
    )

    text_model_types = ("gemma3_text",)
    optional_keys = ("sliding_window", "layer_types", "attention_bias", *GEMMA_KEYS)
    # Published checkpoints with a vision tower list only the keys that differ from these.
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    }

    def build(self, config: ModelConfig, tp: TensorParallel) -> None:
        for key in ("attn_logit_softcapping", "use_bidirectional_attention"):
            if config.raw.get(key):
                raise ValueError(f"{key} {config.raw[key]!r} is not supported")
        self.model = Gemma3Model(config, tp)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tied=tied, tp=tp)

    def compute_logits(self, hidden: torch.Tensor, indices: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().compute_logits(hidden, indices)
        cap = self.config.final_logit_softcapping
        return torch.tanh(logits / cap) * cap if cap else logits
