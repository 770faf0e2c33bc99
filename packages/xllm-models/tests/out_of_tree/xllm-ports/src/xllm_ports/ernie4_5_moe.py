"""ERNIE 4.5 MoE, after HF transformers' Ernie4_5_MoeForCausalLM: a router with a bias for the choice, shared experts.

T tokens of the step, H query heads, K kv heads, D head dim (heads of this rank), E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from xllm_attention import Attention, AttentionSpec
from xllm_models import CausalLM, ModelConfig, TensorParallel, WeightMap
from xllm_models.config import MoEConfig
from xllm_models.layers import (
    Experts,
    GatedMLP,
    KeepDtypeParameter,
    ParallelLMHead,
    QKVParallelLinear,
    ResidualRMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)


class Ernie45MoeAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, tp: TensorParallel) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_heads,
            config.num_kv_heads,
            tp=tp,
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            reduce_results=False,
            tp=tp,
        )
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


class Ernie45MoeTopKRouter(nn.Module):
    """x [T, hidden], bias [1, E] -> (logits [T, E] fp32, weights [T, k], ids [T, k]). All ranks hold the whole weight.

    The bias takes part in the choice only. The weights are divided by their sum, or by moe_norm_min if that is larger.
    """

    def __init__(self, config: ModelConfig, moe: MoEConfig) -> None:
        super().__init__()
        self.top_k = moe.num_experts_per_token
        self.norm_min = config.own["moe_norm_min"]
        self.weight = KeepDtypeParameter(torch.empty((moe.num_experts, config.hidden_size), dtype=torch.float32))

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = functional.linear(x.float(), self.weight)
        scores = logits.softmax(-1)
        ids = (scores + bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=self.norm_min)
        return logits, weights.to(x.dtype), ids


class Ernie45MoeStatics(nn.Module):
    """The correction bias [1, E] in fp32, which checkpoints keep next to the router."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.e_score_correction_bias = KeepDtypeParameter(torch.empty((1, num_experts), dtype=torch.float32))


class Ernie45MoeSparseMoE(nn.Module):
    """x [T, hidden] -> [T, hidden], this rank's term of the sum over the ranks."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.gate = Ernie45MoeTopKRouter(config, moe)
        self.moe_statics = Ernie45MoeStatics(moe.num_experts)
        self.experts = Experts(
            config.hidden_size,
            moe.num_experts,
            moe.intermediate_size,
            hidden_act=config.hidden_act,
            reduce_results=False,
            tp=tp,
        )
        num_shared = config.own["moe_num_shared_experts"]
        self.shared_experts = ernie_mlp(config, moe.intermediate_size * num_shared, tp) if num_shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, ids = self.gate(x, self.moe_statics.e_score_correction_bias)
        out: torch.Tensor = self.experts(x, weights, ids)
        return out if self.shared_experts is None else out + self.shared_experts(x)


def ernie_mlp(config: ModelConfig, size: int, tp: TensorParallel) -> GatedMLP:
    return GatedMLP(config.hidden_size, size, hidden_act=config.hidden_act, reduce_results=False, tp=tp)


class Ernie45MoeDecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, tp: TensorParallel) -> None:
        super().__init__()
        self.input_layernorm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, tp=tp)
        self.self_attn = Ernie45MoeAttention(config, layer_id, rotary_emb, tp)
        self.post_attention_layernorm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, tp=tp)
        self.mlp: nn.Module
        if config.moe is not None and config.moe.is_sparse(layer_id):
            self.mlp = Ernie45MoeSparseMoE(config, config.moe, tp)
        else:
            self.mlp = ernie_mlp(config, config.intermediate_size, tp)

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class Ernie45MoeModel(nn.Module):
    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp=tp)
        rotary_emb = RotaryEmbedding(config.rope, config.head_dim, config.num_positions, interleaved=True)
        self.layers = nn.ModuleList(
            Ernie45MoeDecoderLayer(config, layer_id, rotary_emb, tp) for layer_id in range(config.num_layers)
        )
        self.norm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, tp=tp)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed_tokens(input_ids)  # [T, hidden]
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class Ernie4_5_MoeForCausalLM(CausalLM):
    weight_map = WeightMap(
        fused={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        stacked={
            "experts.gate_up": ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight"),
            "experts.down": ("experts.{}.down_proj.weight",),
        },
        prestacked={"experts.gate_up": ("experts.gate_up_proj",), "experts.down": ("experts.down_proj",)},
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        ignored=("model.mtp_*",),  # the multi-token prediction layer
    )
    optional_keys = (
        "hidden_act",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "decoder_sparse_step",
        "mlp_only_layers",
    )
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1536,
    }
    own_config: ClassVar[Mapping[str, Any]] = {"moe_num_shared_experts": 2, "moe_norm_min": 1e-12}

    @classmethod
    def parse_config(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Ernie's keys in the names that `ModelConfig` has. ModelArgs have those names already."""
        if raw.get("n_layers") is not None:
            return super().parse_config(raw)
        if raw.get("use_bias"):
            raise ValueError("use_bias true is not supported: the head has no bias")
        num_layers, end = raw["num_hidden_layers"], raw.get("moe_layer_end_index", -1)
        sparse = range(raw.get("moe_layer_start_index", 1), num_layers if end == -1 else end + 1)
        keys = {
            "num_experts": raw.get("moe_num_experts"),
            "num_experts_per_tok": raw.get("moe_k"),
            "decoder_sparse_step": raw.get("moe_layer_interval"),
            "mlp_only_layers": [layer_id for layer_id in range(num_layers) if layer_id not in sparse],
        }
        return super().parse_config({**raw, **keys})

    def build(self, config: ModelConfig, tp: TensorParallel) -> None:
        self.model = Ernie45MoeModel(config, tp)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tied=tied, tp=tp)
