"""Faults of tensor-parallel models, planted into Llama. Imported by path, also by the ranks of `rank_pool`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from xllm_models import CausalLM, ModelConfig, TensorParallel
from xllm_models.compare import trace_rank
from xllm_models.loading import open_checkpoint
from xllm_models.models.llama import LlamaForCausalLM
from xllm_models.ops import all_gather, all_reduce_
from xllm_models.registry import read_model_config

TOKEN_IDS = (5, 90, 3, 3, 41, 17, 60, 2)


def trace(model: CausalLM) -> dict[str, torch.Tensor]:
    return trace_rank(model, TOKEN_IDS).entries


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = forward


def sum_in_layer(layers: Any, tp: TensorParallel) -> None:
    """The MLP of layer 0 sums its own result, and the norm of layer 1 does not."""
    layers[0].mlp.down_proj.reduce_results = True
    layers[1].input_layernorm.tp = layers[1].input_layernorm.group = None


def missing_all_reduce(layers: Any, tp: TensorParallel) -> None:
    sum_in_layer(layers, tp)
    down: Any = layers[0].mlp.down_proj
    replace_forward(down, lambda x: functional.linear(x, down.weight))


def missing_all_reduce_of_an_own_module(layers: Any, tp: TensorParallel) -> None:
    sum_in_layer(layers, tp)
    layers[0].mlp = OwnMlp(layers[0].mlp)


class OwnMlp(nn.Module):
    """Not a layer of the package: nothing says that it must sum."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.activation = mlp.gate_up_proj, mlp.down_proj, mlp.activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.activation(self.gate_up_proj(x)), self.down_proj.weight)


def double_all_reduce(layers: Any, tp: TensorParallel) -> None:
    sum_in_layer(layers, tp)
    forward = layers[0].mlp.down_proj.forward
    replace_forward(layers[0].mlp.down_proj, lambda x: all_reduce_(forward(x), "tp") if tp.size > 1 else forward(x))


def wrong_shard(layers: Any, tp: TensorParallel) -> None:
    gate_up: Any = layers[1].mlp.gate_up_proj
    gate_up.shards = tuple(replace(shard, start=0) for shard in gate_up.shards)


def wrong_shard_of_rows(layers: Any, tp: TensorParallel) -> None:
    o_proj: Any = layers[1].self_attn.o_proj
    o_proj.shard = replace(o_proj.shard, start=(tp.size - 1 - tp.rank) * o_proj.shard.size)


def bias_on_every_rank(layers: Any, tp: TensorParallel) -> None:
    forward = layers[1].self_attn.o_proj.forward
    replace_forward(layers[1].self_attn.o_proj, lambda x: forward(x) + torch.ones(32, device=x.device))


def value_of_the_rank(layers: Any, tp: TensorParallel) -> None:
    layers[1].post_attention_layernorm.eps = 1e-6 + tp.rank


def rope_of_the_rank(layers: Any, tp: TensorParallel) -> None:
    """In all layers: they share the module."""
    forward = layers[1].self_attn.rotary_emb.forward
    replace_forward(layers[1].self_attn.rotary_emb, lambda positions, *args: forward(positions + tp.rank * 3, *args))


class ShardNorm(nn.Module):
    """Takes its mean over this rank's features only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + 1e-6)


def norm_over_a_shard(layers: Any, tp: TensorParallel) -> None:
    attention: Any = layers[1].self_attn
    attention.q_norm = ShardNorm()
    rope = attention.rotary_emb
    attention.rope = [rope]
    attention.rotary_emb = _NormThenRope(attention.q_norm, rope)


class _NormThenRope(nn.Module):
    def __init__(self, norm: nn.Module, rope: nn.Module) -> None:
        super().__init__()
        self.parts = [norm, rope]

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Any:
        norm, rope = self.parts
        return rope(positions, norm(q), k)


def kv_heads_of_other_ranks(layers: Any, tp: TensorParallel) -> None:
    qkv: Any = layers[1].self_attn.qkv_proj
    q, k, v = qkv.shards
    num_kv_heads = k.total // 8
    wrong = (tp.rank % num_kv_heads) if tp.size > num_kv_heads else (tp.size - 1 - tp.rank)
    qkv.shards = (q, replace(k, start=wrong * k.size), replace(v, start=wrong * v.size))


def vocabulary_offset(layers: Any, tp: TensorParallel) -> None:
    """Set in `Faulty.load_weights`, after the weights are loaded."""


def gather_order(layers: Any, tp: TensorParallel) -> None:
    """Set in `Faulty.load_weights` too."""


def logits_of_the_rank(layers: Any, tp: TensorParallel) -> None:
    """Set in `Faulty.compute_logits`."""


def none(layers: Any, tp: TensorParallel) -> None:
    """A sound model."""


class Faulty(LlamaForCausalLM):
    fault: str

    def build(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().build(config, tp)
        globals()[self.fault](self.model.get_submodule("layers"), tp)

    def load_weights(self, *args: Any, **kwargs: Any) -> None:
        super().load_weights(*args, **kwargs)
        embed: Any = self.model.get_submodule("embed_tokens")
        if self.fault == "vocabulary_offset" and self.tp.size > 1:
            embed.shard = replace(embed.shard, start=embed.shard.start + self.tp.rank)
        if self.fault == "gather_order" and self.tp.size > 1:
            replace_forward(self.lm_head, self._gathered_in_another_order)

    def _gathered_in_another_order(self, hidden: torch.Tensor) -> torch.Tensor:
        gathered = all_gather(functional.linear(hidden, self.lm_head.weight), self.tp.size, "tp", dim=1)
        return torch.cat(gathered.chunk(self.tp.size, dim=1)[::-1], dim=1)[:, : self.config.vocab_size].contiguous()

    def compute_logits(self, hidden: torch.Tensor, indices: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().compute_logits(hidden, indices)
        return logits * (1 + self.tp.rank) if self.fault == "logits_of_the_rank" else logits


def load(directory: str | Path, *, tp_rank: int = 0, tp_size: int = 1, fault: str = "none") -> CausalLM:
    class Planted(Faulty):
        pass

    Planted.fault = fault
    config = read_model_config(directory)[1]
    model = Planted(config, tp=TensorParallel(rank=tp_rank, size=tp_size))
    model.load_weights(open_checkpoint(Path(directory)), tp_rank, tp_size)
    return model
