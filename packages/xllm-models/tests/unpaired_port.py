"""A port whose norm after attention does not sum what attention leaves unsummed, built without the check that finds it.

Imported by path, also by the ranks of `rank_pool`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from xllm_models import CausalLM, TensorParallel, causal_lm
from xllm_models.config import read_config
from xllm_models.layers import ResidualRMSNorm
from xllm_models.loading import open_checkpoint
from xllm_models.models.llama import LlamaForCausalLM
from xllm_models.passes import PartialSums


class UnpairedForCausalLM(LlamaForCausalLM):
    def build(self, config: Any, tp: TensorParallel) -> None:
        super().build(config, tp)
        layer: Any = self.model.get_submodule("layers.0")
        layer.post_attention_layernorm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps)


class _Unchecked(PartialSums):
    def enter(self, *args: Any) -> None:
        pass

    def op(self, *args: Any) -> None:
        pass


def load_unchecked(directory: str | Path, *, tp_rank: int = 0, tp_size: int = 1) -> CausalLM:
    with mock.patch.object(causal_lm, "PartialSums", _Unchecked):
        model = UnpairedForCausalLM(read_config(Path(directory)), tp=TensorParallel(rank=tp_rank, size=tp_size))
    model.load_weights(open_checkpoint(Path(directory)), tp_rank, tp_size)
    return model
