"""The mixture-of-experts MLP: a router, and experts whose features are sharded over tensor-parallel ranks.

T tokens, E experts, k experts per token, N hidden, I features of one expert on this rank.
"""

from __future__ import annotations

import torch
from torch import nn

from ..config import MoEConfig
from ..ops import all_reduce_, fused_experts, linear, topk_softmax
from .parallel import ShardedModule, TensorParallel, WeightShard


class TopKRouter(nn.Module):
    """x [T, N] -> (logits [T, E], weights [T, k] in x's dtype, ids [T, k] int32), as HF's routers return them.

    The k most probable experts by a softmax over all; with `normalize` their weights sum to 1, which is the softmax of
    the k largest logits. Every rank holds the whole weight. A family with another routing has a module of its own with
    these results.
    """

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, *, normalize: bool, bias: bool = False) -> None:
        super().__init__()
        self.top_k = top_k
        self.normalize = normalize
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(num_experts)) if bias else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = linear(x, self.weight, self.bias)
        weights, ids = topk_softmax(logits, self.top_k, self.normalize)
        return logits, weights, ids


class Experts(ShardedModule):
    """x [T, N], weights [T, k], ids [T, k] -> [T, N]: the weighted sum of each token's experts (`ops.fused_experts`).

    `reduce_results` as for `RowParallelLinear`. Parameters: gate_up [E, 2I, N] (gate rows, then up rows) and
    down [E, N, I]. An activation other than silu is a ValueError.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        intermediate_size: int,
        *,
        hidden_act: str,
        reduce_results: bool = True,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        if hidden_act not in ("silu", "swish"):
            raise ValueError(f"hidden_act {hidden_act!r} of experts is not supported; supported: ['silu', 'swish']")
        self.tp = tp
        self.reduce_results = reduce_results
        self.hidden_size = hidden_size
        self.shard = tp.shard("moe_intermediate_size", intermediate_size)
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * self.shard.size, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, self.shard.size))

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = fused_experts(x, weights, ids, self.gate_up, self.down)
        return all_reduce_(out, self.tp.group) if self.reduce_results and self.tp.size > 1 else out

    def weight_shards(self, name: str) -> tuple[WeightShard, ...]:
        """gate_up: the gate and the up region of expert 0, then of expert 1, ...; down: one region per expert."""
        total, size = self.shard.total, self.shard.size
        share = self.shard.rows
        hidden = slice(0, self.hidden_size)
        found = []
        for expert in range(self.down.shape[0]):
            here = slice(expert, expert + 1)
            if name == "down":
                target = (here, hidden, slice(0, size))
                found.append(WeightShard(shape=(self.hidden_size, total), source=(hidden, share), target=target))
                continue
            for offset in (0, size):
                target = (here, slice(offset, offset + size), hidden)
                found.append(WeightShard(shape=(total, self.hidden_size), source=(share, hidden), target=target))
        return tuple(found)


class SparseMoE(nn.Module):
    """x [T, N] -> [T, N]: `TopKRouter` and `Experts`. Errors and `reduce_results` are those of `Experts`."""

    def __init__(
        self, hidden_size: int, config: MoEConfig, *, hidden_act: str, reduce_results: bool = True, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.gate = TopKRouter(
            hidden_size, config.num_experts, config.num_experts_per_token, normalize=config.normalize
        )
        self.experts = Experts(
            hidden_size,
            config.num_experts,
            config.intermediate_size,
            hidden_act=hidden_act,
            reduce_results=reduce_results,
            tp=tp,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, ids = self.gate(x)
        out: torch.Tensor = self.experts(x, weights, ids)
        return out
