"""Logits of every family against HF transformers in fp32, over all kinds of steps of a paged cache."""

from __future__ import annotations

from collections.abc import Callable
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


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_hf_over_prefill_chunks_mixed_and_decode(
    case: str, write_checkpoint: Callable[..., Any], make_session: Callable[..., Any]
) -> None:
    model_type, config = CASES[case]
    hf, directory = write_checkpoint(model_type, seed=sorted(CASES).index(case), **config)
    model = load_model(directory)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, model.config.vocab_size, (n,), generator=generator).tolist() for n in (19, 12, 23)]
    with torch.no_grad():
        want = [hf(torch.tensor([text])).logits[0] for text in texts]

    session = make_session(model=model, num_sequences=3)
    # Each step: (sequence, number of its next tokens).
    steps = [
        [(0, 13), (1, 4)],  # whole prompts
        [(0, 1), (2, 7), (1, 3)],  # a decode, a new prompt and a chunk, in one batch
        [(2, 11), (0, 1)],  # a chunk behind a prefix, before a decode
        *([[(1, 1), (0, 1), (2, 1)]] * 4),  # decode
        [(2, 1)],
        [(1, 1)],
    ]
    for step in steps:
        starts = {sequence: session.lengths[sequence] for sequence, _ in step}
        got = session.step([(s, texts[s][starts[s] : starts[s] + n]) for s, n in step])
        for (sequence, count), logits in zip(step, got, strict=True):
            assert_close(logits, want[sequence][starts[sequence] : starts[sequence] + count])
    assert session.lengths == [len(text) for text in texts]
