"""Logits of every family against HF transformers in fp32, over all kinds of steps of a paged cache."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from xllm_models import load_model

TOLERANCE = 1e-4

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}

LATENT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama multi-query": ("llama", {"num_key_value_heads": 1}),
    "llama odd heads": (
        "llama",
        {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 101},
    ),
    "llama head_dim": ("llama", {"head_dim": 20}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}),
    "llama dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("llama", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 tied": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3 multi-query": ("qwen3", {"head_dim": 8, "num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
    "qwen3 multi-head": ("qwen3", {"head_dim": 8, "num_key_value_heads": 4, "num_hidden_layers": 3}),
    "qwen3 wide heads": (
        "qwen3",
        {"head_dim": 24, "hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5},
    ),
    "qwen3 biases": ("qwen3", {"head_dim": 12, "attention_bias": True}),
    "qwen3 theta": ("qwen3", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3 yarn": ("qwen3", {"head_dim": 16, "rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0}}),
    "qwen3 window": (
        "qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3 layer types": (
        "qwen3",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 3,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_hf_over_prefill_chunks_mixed_and_decode(
    case: str, write_checkpoint: Callable[..., Any], hf_logits: Callable[..., list[torch.Tensor]], paged: ModuleType
) -> None:
    model_type, config = CASES[case]
    hf, directory = write_checkpoint(model_type, seed=sorted(CASES).index(case), **config)
    want = hf_logits(hf)
    assert_close(paged.run_steps(load_model(directory)), want)


def assert_close(results: Any, want: list[torch.Tensor]) -> None:
    for sequence, start, logits in results:
        expected = want[sequence][start : start + len(logits)]
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_random_configs_equal_hf_on_1_2_and_4_ranks(
    family: str,
    number: int,
    draw_config: Callable[..., dict[str, Any]],
    write_checkpoint: Callable[..., Any],
    hf_logits: Callable[..., list[torch.Tensor]],
    paged: ModuleType,
    rank_pool: Any,
) -> None:
    hf, directory = write_checkpoint(family, seed=number, **draw_config(family, number))
    want = hf_logits(hf)
    # Longer than every text. Only longrope asks: whether that is longer than the trained length.
    options = {"max_model_len": 24} if family == "phi3" else {}
    assert_close(paged.run_steps(load_model(directory, **options)), want)
    for size in (2, 4):
        first, *others = rank_pool.run(directory, size, **options)
        assert_close(first, want)
        for other in others:
            assert all(torch.equal(a, b) for (_, _, a), (_, _, b) in zip(first, other, strict=True))


@pytest.mark.parametrize(
    "model_type",
    [
        *(
            "gemma3_text",
            "glm4",
            "glm4_moe",
            "llama",
            "mistral",
            "mixtral",
            "olmo2",
            "phi3",
            "qwen2",
            "qwen3",
            "qwen3_moe",
        ),
        *("qwen3_next", "qwen3_5_text", "gpt_oss", "deepseek_v2", "deepseek_v3"),
    ],
)
def test_bf16_stays_as_near_to_fp32_as_hf_does(
    model_type: str,
    write_checkpoint: Callable[..., Any],
    hf_logits: Callable[..., list[torch.Tensor]],
    paged: ModuleType,
) -> None:
    linear = {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    own = {
        # Every token takes every expert: HF and we, in bf16, may choose others at a score that is nearly equal.
        "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": 5},
        "phi3": {"pad_token_id": None},
        "glm4": {"pad_token_id": None},
        "qwen3_moe": experts,
        "qwen3_next": linear | experts,
        "qwen3_5_text": linear,
        "mixtral": {"num_local_experts": 4},
        "deepseek_v2": LATENT,
        "deepseek_v3": LATENT,
        "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    }
    hf, directory = write_checkpoint(model_type, head_dim=8, **own.get(model_type, {}))
    exact = hf_logits(hf)
    theirs = [logits.float() for logits in hf_logits(hf.bfloat16())]
    ours = [torch.empty_like(logits) for logits in exact]
    for sequence, start, logits in paged.run_steps(load_model(directory, dtype=torch.bfloat16)):
        assert logits.dtype == torch.bfloat16
        ours[sequence][start : start + len(logits)] = logits
    errors = [
        torch.cat([x - y for x, y in zip(got, exact, strict=True)]).square().mean().sqrt() for got in (ours, theirs)
    ]
    assert errors[0] <= 1.5 * errors[1]
