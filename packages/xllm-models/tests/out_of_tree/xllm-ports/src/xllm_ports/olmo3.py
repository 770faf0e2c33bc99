"""OLMo-3, after HF transformers' Olmo3ForCausalLM: OLMo-2 with windows in most layers.

Sliding layers have a rotary embedding of their own.
T tokens of the step, H query heads, K kv heads, D head dim. Heads are those of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from xllm_attention import Attention, AttentionSpec
from xllm_models import CausalLM, ModelConfig, TensorParallel, WeightMap
from xllm_models.layers import (
    GatedMLP,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    Shard,
    ShardedModule,
    VocabParallelEmbedding,
    WeightShard,
    row_shards,
)
from xllm_models.ops import all_reduce_


class Olmo3HeadsNorm(ShardedModule):
    """x [T, n], squares [T, 1] -> [T, n]: the RMS norm over the features of all ranks, of which this rank holds n.

    `squares` is the sum over the ranks of their sums of squares. Ranks that hold the same kv head count it twice.
    """

    def __init__(self, shard: Shard, eps: float, tp: TensorParallel) -> None:
        super().__init__()
        self.eps = eps
        self.shard = shard
        self.num_summed = tp.size * shard.size
        self.weight = nn.Parameter(torch.empty(shard.size))

    def weight_shards(self, name: str) -> tuple[WeightShard, ...]:
        return row_shards((self.shard,))

    def forward(self, x: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        scaled = x.float() * torch.rsqrt(squares / self.num_summed + self.eps)
        return (self.weight * scaled).to(x.dtype)


class Olmo3Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.head_dim = config.head_dim
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
        q_shard, k_shard, _ = self.qkv_proj.shards
        self.q_norm = Olmo3HeadsNorm(q_shard, config.rms_norm_eps, tp)
        self.k_norm = Olmo3HeadsNorm(k_shard, config.rms_norm_eps, tp)
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
        q, k = q.flatten(1), k.flatten(1)
        squares = torch.stack([x.float().square().sum(-1) for x in (q, k)], dim=1)  # [T, 2]
        if self.tp.size > 1:
            all_reduce_(squares, self.tp.group)
        q = self.q_norm(q, squares[:, :1]).unflatten(1, (-1, self.head_dim))
        k = self.k_norm(k, squares[:, 1:]).unflatten(1, (-1, self.head_dim))
        q, k = self.rotary_emb(positions, q, k)
        out: torch.Tensor = self.o_proj(self.attn(q, k, v).flatten(1))
        return out


class Olmo3DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, tp: TensorParallel) -> None:
        super().__init__()
        self.self_attn = Olmo3Attention(config, layer_id, rotary_emb, tp)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, hidden_act=config.hidden_act, tp=tp)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.post_attention_layernorm(self.self_attn(positions, hidden))
        return hidden + self.post_feedforward_layernorm(self.mlp(hidden))


class Olmo3Model(nn.Module):
    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp=tp)
        full = RotaryEmbedding(config.rope, config.head_dim, config.num_positions)
        sliding = RotaryEmbedding(config.sliding_rope or config.rope, config.head_dim, config.num_positions)
        self.layers = nn.ModuleList(
            Olmo3DecoderLayer(config, layer_id, sliding if config.slides(layer_id) else full, tp)
            for layer_id in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed_tokens(input_ids)  # [T, hidden]
        for layer in self.layers:
            hidden = layer(positions, hidden)
        out: torch.Tensor = self.norm(hidden)
        return out


class Olmo3ForCausalLM(CausalLM):
    weight_map = WeightMap(
        fused={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        tied={"lm_head.weight": "model.embed_tokens.weight"},
    )

    optional_keys = ("sliding_window", "layer_types", "attention_bias", "hidden_act", "rope_local_base_freq")
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "rope_theta": 5e5,
        "rope_local_base_freq": 5e5,  # of sliding layers, which HF does not give the config's rope_theta
    }

    def build(self, config: ModelConfig, tp: TensorParallel) -> None:
        self.model = Olmo3Model(config, tp)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tied=tied, tp=tp)
