"""Ports of a family that is not registered: a sound one, and one for each fault that `check` has to find."""

from __future__ import annotations

from typing import Any

import torch

from xllm_models import ModelConfig, TensorParallel
from xllm_models.layers import ResidualLayerNorm
from xllm_models.models.llama import LlamaForCausalLM


class Sound(LlamaForCausalLM):
    """Llama under another name."""


class LayerNormed(Sound):
    """With norms of another kind, which sum over the ranks too."""

    def build(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().build(config, tp)
        layers: Any = self.model.layers
        for layer in layers:
            layer.input_layernorm = ResidualLayerNorm(config.hidden_size, config.rms_norm_eps, tp=tp)
            layer.post_attention_layernorm = ResidualLayerNorm(config.hidden_size, config.rms_norm_eps, tp=tp)


class ReadsPositions(Sound):
    """Decides by a value of the device, which no graph can hold."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(input_ids, positions)
        return hidden * 2 if positions.max() > 5 else hidden


class CountsCalls(Sound):
    """Counts its calls in Python, which a replay does not see."""

    num_calls = 0

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return super().forward(input_ids, positions) * self.num_calls


class SumsTwice(Sound):
    """Sums over the ranks in the projection and again in the norm after it."""

    def build(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().build(config, tp)
        layers: Any = self.model.layers
        for layer in layers:
            layer.self_attn.o_proj.reduce_results = True


class ScalesByRanks(Sound):
    """Right on one rank only, in a way that building the model does not find."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids, positions) * self.tp.size


class RaisesForThreeTokens(Sound):
    """Has a bug that one batch size meets, for which no graph is captured."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(input_ids, positions)
        if hidden.shape[0] == 3:
            hidden = hidden[:, hidden.shape[1]]
        return hidden


class RaisesWhenBuilt(Sound):
    def build(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().build(config, tp)
        self.missing_attribute.weight = None


class RaisesOnRank1(Sound):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids, positions[self.tp.rank :] if self.tp.rank else positions)


class CountsCallsOnRank1(Sound):
    """Right eagerly with these weights; replays of rank 1 do not see the count."""

    num_calls = 0

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        hidden = super().forward(input_ids, positions)
        return hidden * (1 + 1e-5 * self.num_calls) if self.tp.rank == 1 else hidden
