"""Routers that choose the experts of a token within its best groups of experts (DeepSeek-V2 and V3, GLM-4.5).

The weight, the scores and the results are fp32 in every model dtype, and every rank holds the whole weight.
T tokens, E experts, G groups of E / G experts each, k experts per token, N hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..config import ModelConfig
from ..ops import linear
from .parallel import KeepDtypeParameter

# Keys of config.own that the routers read: the number of groups, the number of groups from which the experts of one
# token may come, and the factor of the weights. A family adds them to its `own_config`.
GROUPED_ROUTING: Mapping[str, Any] = MappingProxyType({"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0})


class GroupedRouter(nn.Module):
    """The parameters of both routers, and their checks.

    ValueError for a config without experts, for groups of different sizes, and for a topk_group that exceeds n_group
    or whose groups have fewer than k experts.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.moe is None:
            raise ValueError(f"the config of {config.architecture} has no n_routed_experts")
        num_experts = config.moe.num_experts
        self.top_k = config.moe.num_experts_per_token
        self.num_groups, self.top_groups = config.own["n_group"], config.own["topk_group"]
        self.scaling_factor = config.own["routed_scaling_factor"]
        self._check(num_experts)
        self.weight = KeepDtypeParameter(torch.empty((num_experts, config.hidden_size), dtype=torch.float32))

    def _check(self, num_experts: int) -> None:
        if self.num_groups < 1 or num_experts % self.num_groups:
            raise ValueError(f"n_group {self.num_groups} does not divide the {num_experts} experts")
        if not 0 < self.top_groups <= self.num_groups:
            raise ValueError(f"topk_group {self.top_groups} is outside 1 to n_group {self.num_groups}")
        size = num_experts // self.num_groups
        if self.top_k > self.top_groups * size:
            raise ValueError(
                f"num_experts_per_tok {self.top_k} exceeds the {self.top_groups * size} experts of topk_group "
                f"{self.top_groups} groups"
            )

    def within_groups(self, scores: torch.Tensor, of_groups: torch.Tensor, outside: float) -> torch.Tensor:
        """scores [T, E] with the value `outside` in all groups but the topk_group best by of_groups [T, G]."""
        groups = of_groups.topk(self.top_groups, dim=-1, sorted=False).indices
        excluded = torch.ones_like(of_groups, dtype=torch.bool).scatter(1, groups, False)
        return self.by_group(scores).masked_fill(excluded.unsqueeze(-1), outside).flatten(1)

    def by_group(self, scores: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, G, E / G]."""
        num_tokens, num_experts = scores.shape
        return scores.view(num_tokens, self.num_groups, num_experts // self.num_groups)


class GroupedSigmoidRouter(GroupedRouter):
    """x [T, N] -> (logits [T, E], weights [T, k], ids [T, k] int64): DeepSeek-V3's router (arXiv:2412.19437, 2.1.2).

    The scores are sigmoids. The choice adds a correction bias per expert, the weights do not: the k best experts of
    the best groups, by the sum of the two best experts of each group. With norm_topk_prob a token's weights sum to 1
    before they are scaled. ValueError for groups of one expert.
    """

    e_score_correction_bias: torch.Tensor  # [E] fp32

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        num_experts = self.weight.shape[0]
        if num_experts // self.num_groups < 2:
            raise ValueError(f"n_group {self.num_groups} leaves fewer than 2 of {num_experts} experts per group")
        self.normalize = config.moe is not None and config.moe.normalize
        self.register_buffer("e_score_correction_bias", torch.empty(num_experts, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = linear(x.float(), self.weight)
        scores = logits.sigmoid()
        for_choice = scores + self.e_score_correction_bias
        of_groups = self.by_group(for_choice).topk(2, dim=-1).values.sum(-1)
        candidates = self.within_groups(for_choice, of_groups, float("-inf"))
        ids = candidates.topk(self.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, ids)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * self.scaling_factor, ids


class GroupedSoftmaxRouter(GroupedRouter):
    """x [T, N] -> (logits [T, E], weights [T, k], ids [T, k] int64): DeepSeek-V2's router (arXiv:2405.04434, 2.2.2).

    The scores are a softmax over all experts, and the weights are not normalized. config.own["topk_method"] is
    `greedy`, the k best of all experts, or `group_limited_greedy`: the k best experts of the best groups, by the best
    expert of each group. ValueError for another method.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        method = config.own["topk_method"]
        if method not in ("greedy", "group_limited_greedy"):
            raise ValueError(f"topk_method {method!r} is not supported; supported: greedy, group_limited_greedy")
        self.limited = method == "group_limited_greedy"

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = linear(x.float(), self.weight)
        scores = logits.softmax(-1)
        if self.limited:
            scores = self.within_groups(scores, self.by_group(scores).amax(-1), 0.0)
        weights, ids = scores.topk(self.top_k, dim=-1, sorted=False)
        return logits, weights * self.scaling_factor, ids
