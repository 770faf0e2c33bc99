"""The mixture-of-experts MLP of gpt-oss: biases in router and experts, and a clamped SwiGLU.

T tokens, E experts, k experts per token, N hidden, I features of one expert on this rank.
"""

from __future__ import annotations

import torch
from torch import nn

from ..config import ModelConfig
from ..ops import all_reduce_, fused_experts
from .moe import Experts, TopKRouter
from .parallel import TensorParallel, WeightShard


class BiasedExperts(Experts):
    """`Experts` with biases and the clamped SwiGLU of gpt-oss, "swigluoai" of `ops.moe.gated`.

    More parameters: gate_up_bias [E, 2I] and down_bias [E, N], which rank 0 adds.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        intermediate_size: int,
        *,
        alpha: float,
        limit: float,
        reduce_results: bool = True,
        tp: TensorParallel,
    ) -> None:
        super().__init__(
            hidden_size, num_experts, intermediate_size, hidden_act="silu", reduce_results=reduce_results, tp=tp
        )
        self.alpha = alpha
        self.limit = limit
        self.gate_up_bias = nn.Parameter(torch.empty(num_experts, 2 * self.shard.size))
        self.down_bias = nn.Parameter(torch.empty(num_experts, hidden_size))

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = fused_experts(
            x,
            weights,
            ids,
            self.gate_up,
            self.down,
            self.gate_up_bias,
            self.down_bias if self.tp.rank == 0 else None,
            "swigluoai",
            self.alpha,
            self.limit,
        )
        return all_reduce_(out, self.tp.group) if self.reduce_results and self.tp.size > 1 else out

    def weight_shards(self, name: str) -> tuple[WeightShard, ...]:
        """Of the biases: as of the weights, without the inputs."""
        if not name.endswith("_bias"):
            return super().weight_shards(name)
        total, size, share = self.shard.total, self.shard.size, self.shard.rows
        hidden = slice(0, self.hidden_size)
        found = []
        for expert in range(self.down.shape[0]):
            here = slice(expert, expert + 1)
            if name == "down_bias":
                found.append(WeightShard(shape=(self.hidden_size,), source=(hidden,), target=(here, hidden)))
                continue
            for offset in (0, size):
                target = (here, slice(offset, offset + size))
                found.append(WeightShard(shape=(total,), source=(share,), target=target))
        return tuple(found)


class BiasedSparseMoE(nn.Module):
    """x [T, N] -> [T, N]: `TopKRouter` with a bias, named router as in HF, and `BiasedExperts`.

    Reads swiglu_alpha and swiglu_limit of config.own. ValueError for a config without experts.
    """

    def __init__(self, config: ModelConfig, *, reduce_results: bool = True, tp: TensorParallel) -> None:
        super().__init__()
        moe, size = config.moe, config.hidden_size
        if moe is None:
            raise ValueError(f"the config of {config.architecture} has no num_local_experts")
        self.router = TopKRouter(size, moe.num_experts, moe.num_experts_per_token, normalize=moe.normalize, bias=True)
        self.experts = BiasedExperts(
            size,
            moe.num_experts,
            moe.intermediate_size,
            alpha=config.own["swiglu_alpha"],
            limit=config.own["swiglu_limit"],
            reduce_results=reduce_results,
            tp=tp,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, ids = self.router(x)
        out: torch.Tensor = self.experts(x, weights, ids)
        return out
