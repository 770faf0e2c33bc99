"""gpt-oss, after HF transformers' GptOssForCausalLM: attention sinks, windows in every second layer, biases, and
experts with a clamped activation.

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
    BiasedSparseMoE,
    ParallelLMHead,
    QKVParallelLinear,
    ResidualRMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    ShardedModule,
    TensorParallel,
    VocabParallelEmbedding,
    WeightShard,
    row_shards,
)
from ..loading import WeightMap


class GptOssAttention(ShardedModule):
    def __init__(self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, tp: TensorParallel) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.attention_bias
        self.qkv_proj = QKVParallelLinear(
            size, config.head_dim, config.num_heads, config.num_kv_heads, bias=bias, tp=tp
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim, size, bias=bias, reduce_results=False, tp=tp
        )
        self.heads = tp.shard("num_attention_heads", config.num_heads)
        self.sinks = nn.Parameter(torch.empty(self.heads.size))  # [H]
        self.rotary_emb = rotary_emb
        spec = AttentionSpec(
            num_heads=self.qkv_proj.num_heads,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            sliding_window=config.window(layer_id),
            sinks=True,
        )
        self.attn = Attention(spec, layer_id)

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(hidden)  # [T, H, D], [T, K, D], [T, K, D]
        q, k = self.rotary_emb(positions, q, k)
        out: torch.Tensor = self.o_proj(self.attn(q, k, v, self.sinks).flatten(1))
        return out

    def weight_shards(self, name: str) -> tuple[WeightShard, ...]:
        """Of the sinks: this rank's heads."""
        return row_shards((self.heads,))


class GptOssDecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, tp: TensorParallel) -> None:
        super().__init__()
        self.input_layernorm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, tp=tp)
        self.self_attn = GptOssAttention(config, layer_id, rotary_emb, tp)
        self.post_attention_layernorm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, tp=tp)
        self.mlp = BiasedSparseMoE(config, reduce_results=False, tp=tp)

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class GptOssModel(nn.Module):
    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp=tp)
        rotary_emb = RotaryEmbedding(config.rope, config.head_dim, config.num_positions)
        self.layers = nn.ModuleList(
            GptOssDecoderLayer(config, layer_id, rotary_emb, tp) for layer_id in range(config.num_layers)
        )
        self.norm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, tp=tp)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed_tokens(input_ids)  # [T, hidden]
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class GptOssForCausalLM(CausalLM):
    # A published checkpoint has the experts in MXFP4; `loading.quantized` shows them under the names of plain ones.
    weight_map = WeightMap(
        fused={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
        prestacked={
            "experts.gate_up": ("experts.gate_up_proj",),
            "experts.gate_up_bias": ("experts.gate_up_proj_bias",),
            "experts.down": ("experts.down_proj",),
            "experts.down_bias": ("experts.down_proj_bias",),
        },
        transposed=("*.experts.gate_up_proj", "*.experts.down_proj"),
        interleaved=("*.experts.gate_up_proj", "*.experts.gate_up_proj_bias"),
        tied={"lm_head.weight": "model.embed_tokens.weight"},
    )
    # The experts' size is intermediate_size. HF's class has a hidden_act and does not read it.
    optional_keys = (
        *("sliding_window", "layer_types", "attention_bias", "hidden_act"),
        *("num_experts", "num_local_experts", "num_experts_per_tok"),
    )
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "attention_bias": True,
        "sliding_window": 128,
        "sliding_window_pattern": 2,  # of a config.json without layer_types
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    }
    own_config: ClassVar[Mapping[str, Any]] = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}

    @classmethod
    def parse_config(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """As `CausalLM.parse_config`, with HF's default of the rope for a config.json without one."""
        # ModelArgs (n_layers) have a value for each key.
        if raw.get("n_layers") is None and raw.get("rope_parameters") is None and raw.get("rope_scaling") is None:
            yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
            raw = {**raw, "rope_parameters": {**yarn, "original_max_position_embeddings": 4096}}
        return super().parse_config(raw)

    def build(self, config: ModelConfig, tp: TensorParallel) -> None:
        self.model = GptOssModel(config, tp)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tied=tied, tp=tp)
