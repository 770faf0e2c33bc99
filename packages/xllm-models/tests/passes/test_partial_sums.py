"""Which pairs of layers and norms a model may be built of: each partial sum is summed over the ranks once."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from xllm_models import CausalLM, TensorParallel, get_model_class, load_model
from xllm_models.layers import GatedMLP, ResidualLayerNorm, ResidualRMSNorm, RMSNorm, RowParallelLinear

CONFIG = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "head_dim": 4}
O_PROJ, DOWN_PROJ = "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"

Change = Callable[[Any, TensorParallel], None]  # changes a built model's first layer


def build(change: Change, tp: TensorParallel, model_type: str = "llama") -> CausalLM:
    family = get_model_class(model_type)

    class Port(family):  # type: ignore[misc, valid-type]
        def build(self, config: Any, tp: TensorParallel) -> None:
            super().build(config, tp)
            change(self.model, tp)

    model: CausalLM = Port(CONFIG | MOE | {"model_type": model_type}, tp=tp)
    return model


def set_forward(layer: nn.Module, forward: Callable[..., Any]) -> None:
    layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]


def unchanged(model: Any, tp: TensorParallel) -> None:
    pass


def reduced_before_plain_norms(model: Any, tp: TensorParallel) -> None:
    for layer in model.layers:
        layer.self_attn.o_proj = RowParallelLinear(8 * 2, 8, tp=tp)
        layer.mlp = GatedMLP(8, 12, hidden_act="silu", tp=tp)
        layer.input_layernorm = ResidualRMSNorm(8, 1e-6)
        layer.post_attention_layernorm = ResidualRMSNorm(8, 1e-6)
    model.norm = ResidualRMSNorm(8, 1e-6)


def layer_norms(model: Any, tp: TensorParallel) -> None:
    model.layers[0].post_attention_layernorm = ResidualLayerNorm(8, 1e-6, tp=tp)


def factors_and_views(model: Any, tp: TensorParallel) -> None:
    def forward(self: Any, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden) * 0.5
        hidden = (-hidden.view(-1, 2, 4) / 3).reshape(-1, 8).float() * torch.ones(8, device=hidden.device)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual

    set_forward(model.layers[0], forward)


def parallel_block(model: Any, tp: TensorParallel) -> None:
    def forward(self: Any, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        hidden, residual = self.input_layernorm(hidden, residual)
        return self.self_attn(positions, hidden) + self.mlp(hidden), residual

    set_forward(model.layers[0], forward)


def own_all_reduce(model: Any, tp: TensorParallel) -> None:
    """A port's own layer that sums whole: its result needs no pairing."""
    model.layers[0].self_attn.o_proj = RowParallelLinear(16, 8, tp=tp)
    model.layers[0].post_attention_layernorm = ResidualRMSNorm(8, 1e-6)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    "change",
    [unchanged, reduced_before_plain_norms, layer_norms, factors_and_views, parallel_block, own_all_reduce],
    ids=lambda change: change.__name__,
)
def test_sound_pairs_are_built(change: Change, model_type: str, size: int) -> None:
    build(change, TensorParallel(size=size), model_type)


def plain_norm_after_attention(model: Any, tp: TensorParallel) -> None:
    model.layers[0].post_attention_layernorm = ResidualRMSNorm(8, 1e-6)


def plain_layer_norm_after_attention(model: Any, tp: TensorParallel) -> None:
    model.layers[0].post_attention_layernorm = ResidualLayerNorm(8, 1e-6)


def plain_norm_in_the_next_layer(model: Any, tp: TensorParallel) -> None:
    model.layers[1].input_layernorm = ResidualRMSNorm(8, 1e-6)


def plain_last_norm(model: Any, tp: TensorParallel) -> None:
    model.norm = ResidualRMSNorm(8, 1e-6)


def norm_without_residual(model: Any, tp: TensorParallel) -> None:
    model.layers[0].inner = RMSNorm(8, 1e-6)

    def forward(self: Any, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden, residual = self.post_attention_layernorm(self.inner(self.self_attn(positions, hidden)), residual)
        return self.mlp(hidden), residual

    set_forward(model.layers[0], forward)


def dropped_residual(model: Any, tp: TensorParallel) -> None:
    def forward(self: Any, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden, residual = self.post_attention_layernorm(self.self_attn(positions, hidden), None)
        return self.mlp(hidden), residual

    set_forward(model.layers[0], forward)


def no_last_norm(model: Any, tp: TensorParallel) -> None:
    def forward(self: Any, input_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        return self.layers[0](positions, self.embed_tokens(input_ids), None)[0]

    set_forward(model, forward)


def no_norm_before_the_mlp(model: Any, tp: TensorParallel) -> None:
    def forward(self: Any, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        hidden, residual = self.input_layernorm(hidden, residual)
        return self.mlp(self.self_attn(positions, hidden)), residual

    set_forward(model.layers[0], forward)


def residual_added_before_the_norm(model: Any, tp: TensorParallel) -> None:
    def forward(self: Any, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden, residual = self.post_attention_layernorm(self.self_attn(positions, hidden) + residual, residual)
        return self.mlp(hidden), residual

    set_forward(model.layers[0], forward)


def constant_added(model: Any, tp: TensorParallel) -> None:
    original = model.layers[0].self_attn.forward

    def forward(self: Any, positions: torch.Tensor, hidden: torch.Tensor) -> Any:
        return original(positions, hidden) + 1.0

    set_forward(model.layers[0].self_attn, forward)


def activation_in_place(model: Any, tp: TensorParallel) -> None:
    original = model.layers[0].self_attn.forward

    def forward(self: Any, positions: torch.Tensor, hidden: torch.Tensor) -> Any:
        return original(positions, hidden).relu_()

    set_forward(model.layers[0].self_attn, forward)


def half_reduced_parallel_block(model: Any, tp: TensorParallel) -> None:
    parallel_block(model, tp)
    model.layers[0].self_attn.o_proj = RowParallelLinear(16, 8, tp=tp)


def taken_by_two_norms(model: Any, tp: TensorParallel) -> None:
    model.layers[0].second = ResidualRMSNorm(8, 1e-6, tp=tp)

    def forward(self: Any, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        hidden, residual = self.input_layernorm(hidden, residual)
        out = self.self_attn(positions, hidden)
        first, _ = self.post_attention_layernorm(out, residual)
        second, residual = self.second(out, residual)
        return self.mlp(first + second), residual

    set_forward(model.layers[0], forward)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("change", "producer", "user"),
    [
        (plain_norm_after_attention, O_PROJ, "model.layers.0.post_attention_layernorm"),
        (plain_layer_norm_after_attention, O_PROJ, "model.layers.0.post_attention_layernorm"),
        (plain_norm_in_the_next_layer, DOWN_PROJ, "model.layers.1.input_layernorm"),
        (plain_last_norm, "model.layers.1.mlp.down_proj", "model.norm"),
        (norm_without_residual, O_PROJ, "model.layers.0.inner"),
        (dropped_residual, O_PROJ, "model.layers.0.post_attention_layernorm"),
        (no_last_norm, DOWN_PROJ, "lm_head"),
        (no_norm_before_the_mlp, O_PROJ, "model.layers.0.mlp.gate_up_proj"),
        (residual_added_before_the_norm, O_PROJ, "model.layers.0 "),
        (constant_added, O_PROJ, "model.layers.0.self_attn "),
        (activation_in_place, O_PROJ, "model.layers.0.self_attn "),
        (half_reduced_parallel_block, DOWN_PROJ, "model.layers.0 "),
        (taken_by_two_norms, O_PROJ, "model.layers.0.second"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_partial_sum_that_no_norm_takes_is_refused(change: Change, producer: str, user: str, size: int) -> None:
    with pytest.raises(ValueError, match=f"^{producer} gives partial sums .*{user}"):
        build(change, TensorParallel(size=size))


def test_experts_give_partial_sums_too() -> None:
    with pytest.raises(ValueError, match=r"^model\.layers\.0\.mlp\.experts gives partial .*layers\.1\.input_layern"):
        build(plain_norm_in_the_next_layer, TensorParallel(), "qwen3_moe")


def reduced_before_a_summing_norm(model: Any, tp: TensorParallel) -> None:
    model.layers[0].self_attn.o_proj = RowParallelLinear(16, 8, tp=tp)


def reduced_mlp_before_a_summing_norm(model: Any, tp: TensorParallel) -> None:
    model.layers[0].mlp = GatedMLP(8, 12, hidden_act="silu", tp=tp)


def reduced_and_scaled(model: Any, tp: TensorParallel) -> None:
    factors_and_views(model, tp)
    reduced_before_a_summing_norm(model, tp)


def embedding_as_a_sum(model: Any, tp: TensorParallel) -> None:
    original = model.layers[0].forward

    def forward(self: Any, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        return original(positions, hidden, hidden if residual is None else residual)

    set_forward(model.layers[0], forward)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("change", "producer", "norm"),
    [
        (reduced_before_a_summing_norm, O_PROJ, "model.layers.0.post_attention_layernorm"),
        (reduced_mlp_before_a_summing_norm, DOWN_PROJ, "model.layers.1.input_layernorm"),
        (reduced_and_scaled, O_PROJ, "model.layers.0.post_attention_layernorm"),
        (embedding_as_a_sum, "model.embed_tokens", "model.layers.0.input_layernorm"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_norm_that_would_sum_twice_is_refused(change: Change, producer: str, norm: str, size: int) -> None:
    with pytest.raises(ValueError, match=f"^{norm} sums its input over the ranks .*{producer}"):
        build(change, TensorParallel(size=size))


def test_without_the_check_two_ranks_give_wrong_sums(
    write_checkpoint: Callable[..., Any], paged: ModuleType, rank_pool: Any
) -> None:
    """The fault of `plain_norm_after_attention`: right on one rank, wrong on two."""
    _, directory = write_checkpoint("llama")
    want = list(paged.run_steps(load_model(directory)))
    unpaired = {"loader": "unpaired_port:load_unchecked"}
    for size, sound in ((1, True), (2, False)):
        for rank in rank_pool.run(directory, size, **unpaired):
            pairs = zip(rank, want, strict=True)
            same = [torch.allclose(got, right, rtol=1e-3, atol=1e-4) for (*_, got), (*_, right) in pairs]
            assert all(same) if sound else not any(same)


def test_a_module_that_reads_values_is_named() -> None:
    def change(model: Any, tp: TensorParallel) -> None:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.max() > 5 else x

        set_forward(model.layers[1].mlp, forward)

    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp cannot run on meta tensors: .*meta"):
        build(change, TensorParallel())


def test_a_tensor_that_is_no_buffer_is_named() -> None:
    def change(model: Any, tp: TensorParallel) -> None:
        model.table = torch.zeros(8, device="cpu")

        def forward(self: Any, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.embed_tokens(input_ids) + self.table
            return hidden

        set_forward(model, forward)

    with pytest.raises(ValueError, match=r"model cannot run on meta tensors: "):
        build(change, TensorParallel())
