"""DeepSeek-V2 and V3, after HF transformers' DeepseekV2ForCausalLM and DeepseekV3ForCausalLM: latent attention (MLA).

Attention is absorbed (arXiv:2405.04434, 2.1): the cache holds one row per token, the normed compressed kv and the
rotated key features that all heads share. The key half of kv_b_proj goes into the queries, its value half into the
result.
T tokens of the step, H query heads of this rank, L kv_lora_rank, N qk_nope_head_dim, R qk_rope_head_dim, V v_head_dim.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from xllm_attention import Attention, AttentionSpec

from ..causal_lm import CausalLM
from ..config import ROUTED_EXPERT_KEYS, ModelConfig
from ..layers import (
    GROUPED_ROUTING,
    ColumnParallelLinear,
    GatedMLP,
    GroupedSigmoidRouter,
    GroupedSoftmaxRouter,
    ParallelLMHead,
    ResidualRMSNorm,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    SharedExpertsMoE,
    TensorParallel,
    VocabParallelEmbedding,
)
from ..loading import WeightMap

Router = type[GroupedSoftmaxRouter] | type[GroupedSigmoidRouter]

_LATENT_NORM_EPS = 1e-6  # of q_a_layernorm and kv_a_layernorm, which HF gives no eps
_WHOLE = TensorParallel()  # projections to the latent rows, which every rank holds whole


class DeepseekAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, tp: TensorParallel) -> None:
        super().__init__()
        if config.num_kv_heads != config.num_heads:
            raise ValueError(
                f"num_key_value_heads {config.num_kv_heads} must be num_attention_heads {config.num_heads}: the heads "
                "of latent attention share one cached row"
            )
        size, heads, bias = config.hidden_size, config.num_heads, config.attention_bias
        self.nope_dim, self.rope_dim = config.own["qk_nope_head_dim"], config.own["qk_rope_head_dim"]
        self.v_dim, self.kv_rank = config.own["v_head_dim"], config.own["kv_lora_rank"]
        self.num_heads = tp.shard("num_attention_heads", heads).size
        qk_dim, q_rank = self.nope_dim + self.rope_dim, config.own["q_lora_rank"]
        self.has_q_rank = q_rank > 0
        if self.has_q_rank:
            self.q_a_proj = ColumnParallelLinear(size, q_rank, bias=bias, tp=_WHOLE)
            self.q_a_layernorm = RMSNorm(q_rank, _LATENT_NORM_EPS)
            self.q_b_proj = ColumnParallelLinear(q_rank, heads * qk_dim, tp=tp)
        else:
            self.q_proj = ColumnParallelLinear(size, heads * qk_dim, tp=tp)
        self.kv_a_proj_with_mqa = ColumnParallelLinear(size, self.kv_rank + self.rope_dim, bias=bias, tp=_WHOLE)
        self.kv_a_layernorm = RMSNorm(self.kv_rank, _LATENT_NORM_EPS)
        self.kv_b_proj = ColumnParallelLinear(self.kv_rank, heads * (self.nope_dim + self.v_dim), tp=tp)  # weight only
        self.o_proj = RowParallelLinear(heads * self.v_dim, size, bias=bias, reduce_results=False, tp=tp)
        self.rotary_emb = rotary_emb
        spec = AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=self.kv_rank + self.rope_dim,
            scale=qk_dim**-0.5 * config.rope.softmax_scaling,
            v_head_dim=self.kv_rank,
            latent=True,
        )
        self.attn = Attention(spec, layer_id)

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden))) if self.has_q_rank else self.q_proj(hidden)
        q = q.view(-1, self.num_heads, self.nope_dim + self.rope_dim)
        q_nope, q_rope = torch.split(q, [self.nope_dim, self.rope_dim], dim=-1)
        kv, k_rope = torch.split(self.kv_a_proj_with_mqa(hidden), [self.kv_rank, self.rope_dim], dim=-1)
        q_rope, k_rope = self.rotary_emb(positions, q_rope, k_rope.unsqueeze(1))  # [T, H, R], [T, 1, R]
        weight = self.kv_b_proj.weight.view(self.num_heads, self.nope_dim + self.v_dim, self.kv_rank)
        w_key, w_value = torch.split(weight, [self.nope_dim, self.v_dim], dim=1)  # [H, N, L], [H, V, L]
        q_latent = torch.bmm(q_nope.transpose(0, 1), w_key).transpose(0, 1)  # [T, H, L]
        k = torch.cat((self.kv_a_layernorm(kv).unsqueeze(1), k_rope), dim=-1)  # [T, 1, L + R]
        latent = self.attn(torch.cat((q_latent, q_rope), dim=-1), k, None)  # [T, H, L]
        values = torch.bmm(latent.transpose(0, 1), w_value.transpose(1, 2)).transpose(0, 1)  # [T, H, V]
        out: torch.Tensor = self.o_proj(values.flatten(1))
        return out


class DeepseekDecoderLayer(nn.Module):
    def __init__(
        self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, router: Router, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.input_layernorm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, tp=tp)
        self.self_attn = DeepseekAttention(config, layer_id, rotary_emb, tp)
        self.post_attention_layernorm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps, tp=tp)
        self.mlp: nn.Module
        if layer_id >= config.own["first_k_dense_replace"]:
            self.mlp = SharedExpertsMoE(config, router(config), tp)
        else:
            self.mlp = GatedMLP(
                config.hidden_size,
                config.intermediate_size,
                hidden_act=config.hidden_act,
                bias=config.mlp_bias,
                reduce_results=False,
                tp=tp,
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
        rotary_emb = RotaryEmbedding(
            config.rope,
            config.own["qk_rope_head_dim"],
            config.num_positions,
            interleaved=config.own.get("rope_interleave", True),
        )
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
        "topk_method": "greedy",
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "q_lora_rank": 1536,  # 0: queries are projected at once
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    # transformers computes queries, keys and results of attention per head, from the expanded rows.
    compare_names: ClassVar[Mapping[str, str | None]] = dict.fromkeys(
        ("self_attn.attn", "self_attn.attn.q", "self_attn.attn.k")
    )
    fixed_keys: ClassVar[Mapping[str, Any]] = {
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
    }  # no other value is served

    @classmethod
    def parse_config(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """`CausalLM.parse_config`. ValueError also for a value that transformers ignores and DeepSeek's code reads."""
        for key, only in cls.fixed_keys.items():
            if raw.get(key, only) not in (None, only):
                raise ValueError(f"{key} {raw[key]!r} is not supported; allowed: {only!r}")
        if raw.get("n_layers") is not None:
            return super().parse_config(raw)
        q_rank = raw.get("q_lora_rank", cls.own_config["q_lora_rank"])
        head_dim = raw.get("qk_rope_head_dim") or cls.own_config["qk_rope_head_dim"]
        return super().parse_config({**raw, "q_lora_rank": q_rank or 0, "head_dim": head_dim})

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
