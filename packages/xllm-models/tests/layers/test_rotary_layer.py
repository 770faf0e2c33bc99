"""Rotary tables of every type against HF transformers' embeddings, and RopeConfig's spellings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from xllm_models import RopeConfig
from xllm_models.config import parse_rope
from xllm_models.layers.rotary import RotaryEmbedding, rotary_table

HEAD_DIM, LENGTH = 16, 64
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "llama3": LLAMA3,
    "llama3 narrow": LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 2.5, "rope_theta": 100.0},
    "yarn": YARN,
    "yarn betas": YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
    "yarn attention factor": YARN | {"attention_factor": 0.7},
    "yarn mscales": YARN | {"mscale": 0.9, "mscale_all_dim": 0.5},
    "yarn one mscale": YARN | {"mscale": 0.9},
    "yarn not truncated": YARN | {"truncate": False},
    "yarn without trained length": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
}


def hf_config(parameters: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=LENGTH,
        rope_parameters=dict(parameters),
    )


def hf_table(embedding: torch.nn.Module, positions: torch.Tensor) -> torch.Tensor:
    cos, sin = embedding(torch.zeros(1), positions.unsqueeze(0))
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=1)


@pytest.mark.parametrize("name", PARAMETERS)
def test_table_equals_hf(name: str) -> None:
    config = hf_config(PARAMETERS[name])
    rope = parse_rope({"rope_parameters": PARAMETERS[name]}, LENGTH)
    table = rotary_table(rope, HEAD_DIM, LENGTH)
    assert table.dtype == torch.float32
    want = hf_table(LlamaRotaryEmbedding(config), torch.arange(LENGTH))
    torch.testing.assert_close(table, want, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0])
def test_partial_rotary_equals_hf(factor: float) -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": factor}
    config = Phi3Config(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=LENGTH, rope_parameters=dict(parameters)
    )
    rope = parse_rope({"rope_parameters": parameters}, LENGTH)
    table = rotary_table(rope, HEAD_DIM, LENGTH)
    assert table.shape == (LENGTH, int(HEAD_DIM * factor))
    want = hf_table(Phi3RotaryEmbedding(config), torch.arange(LENGTH))
    torch.testing.assert_close(table, want, rtol=1e-6, atol=2e-6)


def test_dynamic_grows_as_hf_does_when_it_decodes_token_by_token() -> None:
    parameters = PARAMETERS["dynamic"]
    rope = parse_rope({"rope_parameters": parameters}, LENGTH)
    assert rope.num_positions(LENGTH) == 2 * LENGTH
    table = rotary_table(rope, HEAD_DIM, 2 * LENGTH)
    embedding = LlamaRotaryEmbedding(hf_config(parameters))
    rows = [hf_table(embedding, torch.tensor([position])) for position in range(2 * LENGTH)]
    torch.testing.assert_close(table, torch.cat(rows), rtol=1e-5, atol=2e-5)
    assert not torch.allclose(table[LENGTH:], rotary_table(RopeConfig(), HEAD_DIM, 2 * LENGTH)[LENGTH:], atol=1e-2)


def test_table_is_real_under_the_meta_device_and_stays_out_of_state_dicts() -> None:
    with torch.device("meta"):
        layer = RotaryEmbedding(RopeConfig(), HEAD_DIM, LENGTH)
    assert layer.cos_sin.device.type == "cpu"
    assert not layer.state_dict()


@pytest.mark.parametrize("factor", [0.1, 1.5, 0.3])
def test_odd_or_too_many_rotary_features_are_refused(factor: float) -> None:
    with pytest.raises(ValueError, match=r"rotary features must be even and at most head_dim 10, got"):
        rotary_table(RopeConfig(partial_rotary_factor=factor), 10, 4)
    with pytest.raises(ValueError, match="more than 2 rotary features, got 2"):
        rotary_table(RopeConfig(rope_type="dynamic", original_max_position_embeddings=4), 2, 4)


EQUAL_SPELLINGS: list[tuple[dict[str, Any], RopeConfig]] = [
    ({}, RopeConfig()),
    ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
    ({"rope_theta": 500000}, RopeConfig(theta=5e5)),
    ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
    ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(theta=5e5)),
    (
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
        RopeConfig(rope_type="linear", factor=2.0),
    ),
    (
        {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2}},
        RopeConfig(rope_type="linear", factor=2.0),
    ),
    ({"rope_scaling_rope_type": "linear", "rope_scaling_factor": 2.0}, RopeConfig(rope_type="linear", factor=2.0)),
    (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        RopeConfig(rope_type="dynamic", factor=2.0, original_max_position_embeddings=LENGTH),
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16}},
        RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    (
        {"original_max_position_embeddings": 16, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    (
        {"partial_rotary_factor": 0.5, "rope_theta": 1e4},
        RopeConfig(partial_rotary_factor=0.5),
    ),
]


@pytest.mark.parametrize(("raw", "want"), EQUAL_SPELLINGS)
def test_every_spelling_is_read(raw: dict[str, Any], want: RopeConfig) -> None:
    assert parse_rope(raw, LENGTH) == want


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"rope_scaling": {"type": "wavy"}}, r"rope type 'wavy' is not supported; supported: \['default'"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope type 'proportional' is not supported"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "contradictory keys: rope_theta is 10000.0 in"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear"}}, "rope_type is 'yarn' in rope_scaling and 'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "the rope parameters has no factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor in the rope parameters must be a number"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"rope_theta": -1.0}, "must be positive"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 0.5}}, "high_freq_factor 0.5 must exceed"),
        ({"rope_scaling": "linear"}, "rope_scaling in config must be a mapping"),
    ],
)
def test_bad_rope_parameters_are_named(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rope(raw, LENGTH)
