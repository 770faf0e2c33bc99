"""Every rope type that extends the context serves lengths beyond max_position_embeddings, with HF's logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from xllm_models import load_model
from xllm_models.config import ModelConfig

TOLERANCE = 5e-6
TRAINED = 8  # shorter than every text of the paged session, whose longest has 23 tokens
SERVED = 32

LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
DYNAMIC = LINEAR | {"rope_type": "dynamic"}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 3.0, 5.0],
}
INSIDE = {"original_max_position_embeddings": TRAINED}
FULL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


def nested(full: dict[str, Any]) -> dict[str, Any]:
    sliding = {"rope_type": "default", "rope_theta": 100.0}
    return FULL | {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


# The family and its config. max_position_embeddings is 8 where it is not given.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"rope_parameters": LINEAR}),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC}),
    "llama3": ("llama", {"rope_parameters": LLAMA3 | INSIDE}),
    "llama3, length outside": ("llama", {"rope_parameters": LLAMA3} | INSIDE),
    "llama3, no length": ("llama", {"rope_parameters": LLAMA3}),
    "llama3, already extended": ("llama", {"rope_parameters": LLAMA3 | INSIDE, "max_position_embeddings": SERVED}),
    "yarn": ("qwen3", {"rope_parameters": YARN | INSIDE}),
    "yarn, length outside": ("llama", {"rope_parameters": YARN} | INSIDE),
    "yarn, no length": ("qwen3", {"rope_parameters": YARN}),
    "yarn, already extended": ("mistral", {"rope_parameters": YARN | INSIDE, "max_position_embeddings": SERVED}),
    "longrope": ("llama", {"rope_parameters": LONGROPE | INSIDE, "max_position_embeddings": SERVED}),
    "longrope, length outside": ("phi3", {"rope_parameters": LONGROPE, "max_position_embeddings": SERVED} | INSIDE),
    "longrope, by its factor": ("llama", {"rope_parameters": LONGROPE | INSIDE | {"factor": 4.0}}),
    "gemma linear": ("gemma3_text", nested(LINEAR)),
    "gemma dynamic": ("gemma3_text", nested(DYNAMIC)),
    "gemma llama3": ("gemma3_text", nested(LLAMA3 | INSIDE)),
    "gemma yarn": ("gemma3_text", nested(YARN | INSIDE)),
    "qwen2 linear": ("qwen2", {"rope_parameters": LINEAR}),
    "qwen3_moe yarn": (
        "qwen3_moe",
        {"rope_parameters": YARN, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}


def token_by_token(hf: Any, text: list[int]) -> torch.Tensor:
    """HF's logits when it decodes from the first token on: `dynamic` rope then has the length of each position."""
    cache = DynamicCache(config=hf.config)
    with torch.no_grad():
        return torch.cat([hf(torch.tensor([[token]]), cache=cache).logits[0] for token in text])


def checkpoint(case: str, write_checkpoint: Callable[..., Any]) -> Any:
    family, config = CASES[case]
    own = {"max_position_embeddings": TRAINED} | config
    if family == "phi3":
        own["pad_token_id"] = None
    elif family != "qwen2":
        own["head_dim"] = 8
    return write_checkpoint(family, **own)


@pytest.mark.parametrize("case", CASES)
def test_logits_beyond_the_trained_length_equal_hf(
    case: str, write_checkpoint: Callable[..., Any], paged: ModuleType
) -> None:
    hf, directory = checkpoint(case, write_checkpoint)
    texts = paged.texts(hf.config.vocab_size)
    if "dynamic" in case:
        want = [token_by_token(hf, text) for text in texts]
    else:
        with torch.no_grad():
            want = [hf(torch.tensor([text])).logits[0] for text in texts]
    model = load_model(directory, max_model_len=SERVED)
    assert model.config.num_positions == SERVED
    for sequence, start, logits in paged.run_steps(model):
        expected = want[sequence][start : start + len(logits)]
        assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_no_more_is_served_than_the_factor_extends(case: str, write_checkpoint: Callable[..., Any]) -> None:
    _, directory = checkpoint(case, write_checkpoint)
    with pytest.raises(ValueError, match=r"max_model_len 33 is outside 1 to 32, the model's positions \(rope type '"):
        load_model(directory, max_model_len=SERVED + 1)


def test_a_model_without_scaling_serves_its_positions_only(write_checkpoint: Callable[..., Any]) -> None:
    _, directory = write_checkpoint("llama", max_position_embeddings=TRAINED)
    with pytest.raises(ValueError, match="max_model_len 9 is outside 1 to 8, the model's positions"):
        load_model(directory, max_model_len=TRAINED + 1)


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_serves_the_extended_length(
    size: int, write_checkpoint: Callable[..., Any], hf_logits: Callable[..., Any], rank_pool: Any
) -> None:
    hf, directory = write_checkpoint("llama", max_position_embeddings=TRAINED, rope_parameters=LINEAR)
    want = hf_logits(hf)
    for results in rank_pool.run(directory, size, max_model_len=SERVED):
        for sequence, start, logits in results:
            expected = want[sequence][start : start + len(logits)]
            assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize(
    ("rope", "want"),
    [
        (LINEAR, TRAINED),
        (LLAMA3, TRAINED),
        (LONGROPE | INSIDE | {"factor": 4.0}, TRAINED),
        (DYNAMIC, SERVED),
        (YARN, SERVED),
    ],
)
def test_without_a_length_the_table_has_the_config_s_positions(rope: dict[str, Any], want: int) -> None:
    """A published model with linear or llama3 rope has the extended length in max_position_embeddings already."""
    raw = {
        "model_type": "llama",
        "vocab_size": 5,
        "hidden_size": 32,
        "intermediate_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": TRAINED,
        "rope_parameters": rope,
    }
    config = ModelConfig.from_dict(raw)
    assert config.num_positions == want
    assert config.max_num_positions == SERVED


def test_rope_of_text_in_a_vision_model_is_the_default_one(
    write_checkpoint: Callable[..., Any], hf_logits: Callable[..., Any], paged: ModuleType
) -> None:
    """Qwen-VL's mrope rotates by three positions, which are equal for text."""
    hf, directory = write_checkpoint("qwen2", max_position_embeddings=64)
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    theta = raw.pop("rope_parameters")["rope_theta"]
    path.write_text(
        json.dumps(
            raw
            | {
                "rope_theta": theta,
                "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]},
            }
        )
    )
    want = hf_logits(hf)
    for sequence, start, logits in paged.run_steps(load_model(directory)):
        expected = want[sequence][start : start + len(logits)]
        assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()
