"""Gated DeltaNet, the linear attention of Qwen3-Next and Qwen3.5, with its heads sharded over tensor-parallel ranks.

The formula belongs to `xllm_attention.GatedDeltaNetSpec`. T tokens, Hk key
heads, Hv value heads, Dk and Dv elements of a key and a value head, C channels of q, k and v together, on this rank.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn
from torch.nn import functional

from xllm_attention import GatedDeltaNetSpec, StateLayer

from ..config import ModelConfig
from .linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from .parallel import Shard, ShardedModule, TensorParallel, WeightShard, row_shards


class GatedRMSNorm(nn.Module):
    """x, gate [..., size] -> RMSNorm(x) * silu(gate); rounded to the model's dtype before the gate, as in HF."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        high = x.to(torch.float64 if x.dtype is torch.float64 else torch.float32)
        normed = high * torch.rsqrt(high.square().mean(-1, keepdim=True) + self.eps)
        return ((self.weight * normed.to(x.dtype)) * functional.silu(gate.to(high.dtype))).to(x.dtype)


class CausalConv1d(ShardedModule):
    """Weight [C, 1, W] of a depthwise convolution over q, k and v, which `StateLayer` computes."""

    def __init__(self, shards: tuple[Shard, ...], kernel_size: int) -> None:
        super().__init__()
        self.shards = shards
        self.weight = nn.Parameter(torch.empty(sum(shard.size for shard in shards), 1, kernel_size))

    def weight_shards(self, name: str) -> tuple[WeightShard, ...]:
        return row_shards(self.shards, *self.weight.shape[1:])


class GatedDeltaNet(ShardedModule):
    """x [T, hidden] -> [T, hidden], a partial sum over the ranks. A subclass makes the input projections.

    Args:
        config: with the keys `linear_*` among the family's own.
        layer_id: of the state layer.
        tp: each rank holds whole key heads with their value heads. Key heads that do not divide by the ranks are a
            ValueError, and so is an activation other than silu.
    """

    def __init__(self, config: ModelConfig, layer_id: int, tp: TensorParallel) -> None:
        super().__init__()
        if config.hidden_act not in ("silu", "swish"):
            raise ValueError(
                f"hidden_act {config.hidden_act!r} of linear attention is not supported; supported: ['silu', 'swish']"
            )
        own = config.own
        head_k_dim, head_v_dim = own["linear_key_head_dim"], own["linear_value_head_dim"]
        key_heads = tp.shard("linear_num_key_heads", own["linear_num_key_heads"])
        self.value_heads = tp.shard("linear_num_value_heads", own["linear_num_value_heads"])
        self.spec = GatedDeltaNetSpec(
            num_k_heads=key_heads.size,
            num_v_heads=self.value_heads.size,
            head_k_dim=head_k_dim,
            head_v_dim=head_v_dim,
            conv_kernel_size=own["linear_conv_kernel_dim"],
        )
        keys, values = _times(key_heads, head_k_dim), _times(self.value_heads, head_v_dim)
        self.conv1d = CausalConv1d((keys, keys, values), self.spec.conv_kernel_size)
        self.A_log = nn.Parameter(torch.empty(self.value_heads.size))
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads.size))
        self.norm = GatedRMSNorm(head_v_dim, config.rms_norm_eps)
        self.out_proj = RowParallelLinear(values.total, config.hidden_size, reduce_results=False, tp=tp)
        self.state = StateLayer(self.spec, layer_id)

    @abstractmethod
    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, hidden] -> qkv [T, C], the gate z [T, Hv, Dv], b [T, Hv], a [T, Hv]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv, z, b, a = self.project(x)
        weights = (self.conv1d.weight.squeeze(1), self.A_log, self.dt_bias)
        out = self.state((qkv, b, a, *weights), z.shape[1:])  # [T, Hv, Dv]
        result: torch.Tensor = self.out_proj(self.norm(out, z).flatten(1))
        return result

    def weight_shards(self, name: str) -> tuple[WeightShard, ...]:
        """Of A_log and dt_bias, which have one element per value head."""
        return row_shards((self.value_heads,))


class GroupedGatedDeltaNet(GatedDeltaNet):
    """With the projections of Qwen3-Next, whose rows are grouped by key head.

    For each key head: q, k, its value heads, their gates; and in the second projection b and a of its value heads.
    """

    def __init__(self, config: ModelConfig, layer_id: int, tp: TensorParallel) -> None:
        super().__init__(config, layer_id, tp)
        spec, own = self.spec, config.own
        self.values_per_key = spec.num_v_heads // spec.num_k_heads * spec.head_v_dim
        num_features = own["linear_num_key_heads"] * 2 * (spec.head_k_dim + self.values_per_key)
        self.in_proj_qkvz = ColumnParallelLinear(config.hidden_size, num_features, tp=tp)
        self.in_proj_ba = ColumnParallelLinear(config.hidden_size, 2 * own["linear_num_value_heads"], tp=tp)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        spec = self.spec
        qkvz = self.in_proj_qkvz(x).view(-1, spec.num_k_heads, 2 * (spec.head_k_dim + self.values_per_key))
        sizes = [spec.head_k_dim, spec.head_k_dim, self.values_per_key, self.values_per_key]
        q, k, v, z = torch.split(qkvz, sizes, dim=2)
        b, a = self.in_proj_ba(x).view(-1, spec.num_k_heads, 2, spec.num_v_heads // spec.num_k_heads).unbind(2)
        qkv = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), dim=1)
        return qkv, z.reshape(-1, spec.num_v_heads, spec.head_v_dim), b.flatten(1), a.flatten(1)


class MergedGatedDeltaNet(GatedDeltaNet):
    """With the projections of Qwen3.5: all q heads, all k heads, all v heads; and z, b, a."""

    def __init__(self, config: ModelConfig, layer_id: int, tp: TensorParallel) -> None:
        super().__init__(config, layer_id, tp)
        own, size = config.own, config.hidden_size
        keys = own["linear_num_key_heads"] * own["linear_key_head_dim"]
        num_value_heads = own["linear_num_value_heads"]
        values = num_value_heads * own["linear_value_head_dim"]
        self.in_proj_qkv = MergedColumnParallelLinear(size, [keys, keys, values], tp=tp)
        self.in_proj_zba = MergedColumnParallelLinear(size, [values, num_value_heads, num_value_heads], tp=tp)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, head_dim = self.spec.num_v_heads, self.spec.head_v_dim
        z, b, a = torch.split(self.in_proj_zba(x), [heads * head_dim, heads, heads], dim=1)
        return self.in_proj_qkv(x), z.view(-1, heads, head_dim), b, a


def _times(heads: Shard, head_dim: int) -> Shard:
    return Shard(total=heads.total * head_dim, start=heads.start * head_dim, size=heads.size * head_dim)
