"""Qwen3-Next, after HF transformers' Qwen3NextForCausalLM: linear attention in most layers, gated attention in others.

A shared expert with a gate of its own is added to the chosen ones. T tokens of the step, H query heads, K kv heads, D
head dim, Hk and Hv key and value heads of linear attention. Heads are those of this rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from xllm_attention import Attention, AttentionSpec

from ..causal_lm import CausalLM
from ..config import ModelConfig
from ..layers import (
    ColumnParallelLinear,
    GatedDeltaNet,
    GatedMLP,
    GatedQKVParallelLinear,
    ParallelLMHead,
    ResidualRMSNorm,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    SparseMoE,
    TensorParallel,
    VocabParallelEmbedding,
)
from ..loading import WeightMap
from ..ops import linear

LINEAR_ATTENTION, FULL_ATTENTION = "linear_attention", "full_attention"


class Qwen3NextAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, tp: TensorParallel) -> None:
        super().__init__()
        self.qkv_proj = GatedQKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_heads,
            config.num_kv_heads,
            bias=config.attention_bias,
            tp=tp,
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            reduce_results=False,
            tp=tp,
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, unit_offset=True)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, unit_offset=True)
        self.rotary_emb = rotary_emb
        spec = AttentionSpec(
            num_heads=self.qkv_proj.num_heads,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
        )
        self.attn = Attention(spec, layer_id)

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        q_and_gate, k, v = self.qkv_proj(hidden)  # [T, H, 2 D], [T, K, D], [T, K, D]
        q, gate = q_and_gate.chunk(2, dim=2)
        q, k = self.rotary_emb(positions, q, k, (self.q_norm, self.k_norm))
        out: torch.Tensor = self.o_proj((self.attn(q, k, v) * torch.sigmoid(gate)).flatten(1))
        return out


class Qwen3NextGatedDeltaNet(GatedDeltaNet):
    def __init__(self, config: ModelConfig, layer_id: int, tp: TensorParallel) -> None:
        super().__init__(config, layer_id, tp)
        spec = self.spec
        # Rows of the checkpoint by key head: q, k, its value heads, their gates; and b, a of its value heads.
        self.values_per_key = spec.num_v_heads // spec.num_k_heads * spec.head_v_dim
        num_key_heads = config.own["linear_num_key_heads"]
        self.in_proj_qkvz = ColumnParallelLinear(
            config.hidden_size, num_key_heads * 2 * (spec.head_k_dim + self.values_per_key), tp=tp
        )
        self.in_proj_ba = ColumnParallelLinear(config.hidden_size, 2 * config.own["linear_num_value_heads"], tp=tp)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        spec = self.spec
        qkvz = self.in_proj_qkvz(x).view(-1, spec.num_k_heads, 2 * (spec.head_k_dim + self.values_per_key))
        sizes = [spec.head_k_dim, spec.head_k_dim, self.values_per_key, self.values_per_key]
        q, k, v, z = torch.split(qkvz, sizes, dim=2)
        b, a = self.in_proj_ba(x).view(-1, spec.num_k_heads, 2, spec.num_v_heads // spec.num_k_heads).unbind(2)
        qkv = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), dim=1)
        return qkv, z.reshape(-1, spec.num_v_heads, spec.head_v_dim), b.flatten(1), a.flatten(1)


class Qwen3NextSparseMoE(SparseMoE):
    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        assert config.moe is not None  # the layer is sparse
        super().__init__(config.hidden_size, config.moe, hidden_act=config.hidden_act, reduce_results=False, tp=tp)
        self.shared_expert = GatedMLP(
            config.hidden_size,
            config.own["shared_expert_intermediate_size"],
            hidden_act=config.hidden_act,
            reduce_results=False,
            tp=tp,
        )
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(linear(x, self.shared_expert_gate.weight))  # [T, 1]
        out: torch.Tensor = super().forward(x) + gate * self.shared_expert(x)
        return out


class Qwen3NextDecoderLayer(nn.Module):
    delta_net: ClassVar[type[GatedDeltaNet]] = Qwen3NextGatedDeltaNet

    def __init__(self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, tp: TensorParallel) -> None:
        super().__init__()
        self.input_layernorm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, unit_offset=True, tp=tp)
        self.is_linear = config.layer_types[layer_id] == LINEAR_ATTENTION
        if self.is_linear:
            self.linear_attn = self.delta_net(config, layer_id, tp)
        else:
            self.self_attn = Qwen3NextAttention(config, layer_id, rotary_emb, tp)
        self.post_attention_layernorm = ResidualRMSNorm(
            config.hidden_size, config.rms_norm_eps, unit_offset=True, tp=tp
        )
        self.mlp: nn.Module
        if config.moe is not None and config.moe.is_sparse(layer_id):
            self.mlp = Qwen3NextSparseMoE(config, tp)
        else:
            self.mlp = GatedMLP(
                config.hidden_size, config.intermediate_size, hidden_act=config.hidden_act, reduce_results=False, tp=tp
            )

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.linear_attn(hidden) if self.is_linear else self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class Qwen3NextModel(nn.Module):
    def __init__(self, config: ModelConfig, layer_class: type[Qwen3NextDecoderLayer], tp: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp=tp)
        rotary_emb = RotaryEmbedding(config.rope, config.head_dim, config.num_positions)
        self.layers = nn.ModuleList(
            layer_class(config, layer_id, rotary_emb, tp) for layer_id in range(config.num_layers)
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

    layer_class: ClassVar[type[Qwen3NextDecoderLayer]] = Qwen3NextDecoderLayer
    layer_types: ClassVar[Collection[str]] = (LINEAR_ATTENTION, FULL_ATTENTION)
    optional_keys: ClassVar[Collection[str] | None] = (
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
        """As the base class. Without `layer_types`, each `full_attention_interval`-th layer has full attention."""
        if raw.get("layer_types") is None and raw.get("num_hidden_layers") is not None:
            interval = raw.get("full_attention_interval") or 4
            types = [
                LINEAR_ATTENTION if (layer_id + 1) % interval else FULL_ATTENTION
                for layer_id in range(raw["num_hidden_layers"])
            ]
            raw = {**raw, "layer_types": types}
        return super().parse_config(raw)

    def build(self, config: ModelConfig, tp: TensorParallel) -> None:
        self.model = Qwen3NextModel(config, self.layer_class, tp)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tied=tied, tp=tp)
