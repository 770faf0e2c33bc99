"""Attention whose output has a gate per head (Qwen3-Next, Qwen3.5), with its heads sharded over tensor-parallel ranks.

T tokens, H query heads, K kv heads, D head dim, on this rank.
"""

from __future__ import annotations

import torch
from torch import nn

from xllm_attention import Attention, AttentionSpec

from ..config import ModelConfig
from .linear import GatedQKVParallelLinear, RowParallelLinear
from .norm import RMSNorm
from .parallel import TensorParallel
from .rotary import RotaryEmbedding


class GatedAttention(nn.Module):
    """positions [T], x [T, hidden] -> [T, hidden], a partial sum over the ranks.

    Queries and keys are normalized with zero-centred weights. The attention's result is multiplied by sigmoid(gate).
    """

    def __init__(self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, tp: TensorParallel) -> None:
        super().__init__()
        head_dim, bias = config.head_dim, config.attention_bias
        self.qkv_proj = GatedQKVParallelLinear(
            config.hidden_size, head_dim, config.num_heads, config.num_kv_heads, bias=bias, tp=tp
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * head_dim, config.hidden_size, bias=bias, reduce_results=False, tp=tp
        )
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, unit_offset=True)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, unit_offset=True)
        self.rotary_emb = rotary_emb
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        spec = AttentionSpec(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=head_dim**-0.5)
        self.attn = Attention(spec, layer_id)

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        q_and_gate, k, v = self.qkv_proj(x)  # [T, H, 2 D], [T, K, D], [T, K, D]
        q, gate = q_and_gate.chunk(2, dim=2)
        q, k = self.rotary_emb(positions, q, k, (self.q_norm, self.k_norm))
        out: torch.Tensor = self.o_proj((self.attn(q, k, v) * torch.sigmoid(gate)).flatten(1))
        return out
