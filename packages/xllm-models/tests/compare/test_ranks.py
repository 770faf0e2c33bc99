"""A fault over ranks is named by the first module that differs from one rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from xllm_models import load_model
from xllm_models.compare import Trace, first_difference, trace_rank

sys.path.insert(0, str(Path(__file__).parents[1]))
import rank_faults

sys.path.pop(0)

FAULTS = {
    "missing_all_reduce": "model.layers.0.mlp.down_proj",
    "missing_all_reduce_of_an_own_module": "model.layers.0.mlp",
    "double_all_reduce": "model.layers.0.mlp.down_proj",
    "wrong_shard": "model.layers.1.mlp.gate_up_proj",
    "wrong_shard_of_rows": "model.layers.1.self_attn.o_proj",
    "bias_on_every_rank": "model.layers.1.self_attn.o_proj",
    "value_of_the_rank": "model.layers.1.post_attention_layernorm",
    "rope_of_the_rank": "model.layers.0.self_attn.attn.q",
    "norm_over_a_shard": "model.layers.1.self_attn.q_norm",
    "kv_heads_of_other_ranks": "model.layers.1.self_attn.qkv_proj[1]",
    "vocabulary_offset": "model.embed_tokens",
    "gather_order": "lm_head",
    "logits_of_the_rank": "logits",
}


def traces(rank_pool: Any, directory: Path, size: int, **options: Any) -> list[Trace]:
    entries = rank_pool.run(directory, size, call="rank_faults:trace", **options)
    return [Trace(token_ids=rank_faults.TOKEN_IDS, entries=of_rank) for of_rank in entries]


@pytest.fixture(scope="module")
def llama(write_checkpoint: Callable[..., Any]) -> Path:
    directory: Path = write_checkpoint("llama", head_dim=8)[1]
    return directory


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_the_first_module_that_differs_is_named(fault: str, size: int, llama: Path, rank_pool: Any) -> None:
    model = rank_faults.load(llama, fault=fault)
    one = trace_rank(model, rank_faults.TOKEN_IDS)
    ranks = traces(rank_pool, llama, size, loader="rank_faults:load", fault=fault)
    found = first_difference(model, one, ranks, tolerance=1e-4)
    if fault == "none":
        assert found is None
        return
    assert found is not None
    assert found.name == FAULTS[fault], str(found)
    assert found.relative_error > 1e-3
    if fault == "missing_all_reduce_of_an_own_module":
        assert "its terms of a sum over the ranks are not summed before model.layers.1.input_layernorm" in str(found)


LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("gemma3_text", {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}),
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
        ("phi3", {"pad_token_id": None}),
        ("qwen2", {}),
        ("qwen3_moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        ("mixtral", {"head_dim": 8, "num_local_experts": 4}),
        ("glm4", {"head_dim": 16, "pad_token_id": None}),
        ("olmo2", {"attention_bias": True}),
        ("deepseek_v2", LATENT | {"q_lora_rank": None}),
        ("deepseek_v3", LATENT | {"q_lora_rank": 8}),
        (
            "glm4_moe",
            {"head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
            | {"n_group": 4, "topk_group": 2, "use_qk_norm": True},
        ),
    ],
)
def test_right_families_have_no_difference(
    family: str, config: dict[str, Any], write_checkpoint: Callable[..., Any], rank_pool: Any
) -> None:
    _, directory = write_checkpoint(family, **config)
    model = load_model(directory)
    one = trace_rank(model, rank_faults.TOKEN_IDS)
    for size in (2, 4):
        assert first_difference(model, one, traces(rank_pool, directory, size), tolerance=1e-4) is None


def test_a_share_that_is_not_finite_differs() -> None:
    want = torch.ones(3, 4)
    one = Trace(token_ids=(1, 2, 3), entries={"a": want, "logits": want})
    broken = Trace(token_ids=(1, 2, 3), entries={"a": want, "logits": want * torch.nan})
    found = first_difference(torch.nn.Module(), one, [one, broken], tolerance=1e-4)  # type: ignore[arg-type]
    assert found is not None
    assert (found.name, found.rank, found.relative_error) == ("logits", 1, float("inf"))
    silent = Trace(token_ids=(1, 2, 3), entries={"logits": want})
    found = first_difference(torch.nn.Module(), one, [one, silent], tolerance=1e-4)  # type: ignore[arg-type]
    assert found is not None
    assert (found.name, found.rank, found.hint) == ("a", 1, "it does not run there")
