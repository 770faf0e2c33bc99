"""Multi-head latent attention (MLA, arXiv:2405.04434, 2.1) in its absorbed form, as DeepSeek-V2 and V3 have it.

The cache holds one row per token: the normed compressed kv, and the rotated key features that all heads share. The key
half of kv_b_proj goes into the queries, its value half into the result.
T tokens, H query heads of this rank, L kv_lora_rank, N qk_nope_head_dim, R qk_rope_head_dim, V v_head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from xllm_attention import Attention, AttentionSpec

from ..config import ModelConfig
from .linear import ColumnParallelLinear, RowParallelLinear
from .norm import RMSNorm
from .parallel import TensorParallel
from .rotary import RotaryEmbedding

# Keys of config.own that the layer reads. A q_lora_rank of 0 projects the queries at once. A family adds them to its
# `own_config`.
LATENT_ATTENTION: Mapping[str, Any] = MappingProxyType(
    {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
)

_LATENT_NORM_EPS = 1e-6  # of q_a_layernorm and kv_a_layernorm, which HF gives no eps
_WHOLE = TensorParallel()  # projections to the latent rows, which every rank holds whole


class LatentAttention(nn.Module):
    """positions [T], hidden [T, hidden] -> [T, hidden], this rank's term of the sum over the ranks.

    The sizes are keys of config.own, see `LATENT_ATTENTION`. ValueError for another number of kv heads than of heads.
    """

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
