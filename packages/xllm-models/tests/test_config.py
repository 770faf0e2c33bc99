"""ModelConfig: both spellings, the round trip through ModelArgs names, and errors that name the key."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from xllm_models import ModelConfig, RopeConfig, get_model_class
from xllm_models.config import read_config

HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
}
ARGS: dict[str, Any] = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_ids": [2, 3],
    "rope_theta": 5e5,
    "rope_scaling_rope_type": "linear",
    "rope_scaling_factor": 2.0,
}


EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LONGROPE: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}


def test_hf_and_model_args_names_give_one_config() -> None:
    config = ModelConfig.from_dict(HF)
    assert config.num_layers == 2
    assert config.num_heads == 4
    assert config.num_kv_heads == 2
    assert config.head_dim == 8
    assert config.dtype == torch.bfloat16
    assert config.eos_token_ids == (2, 3)
    assert config.rope == RopeConfig(rope_type="linear", theta=5e5, factor=2.0)
    assert config == ModelConfig.from_dict(ARGS | {"architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("llama", {}),
        ("llama", {"eos_token_id": None, "bos_token_id": None, "tie_word_embeddings": True, "mlp_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}, "architectures": None}),
        ("llama", {"head_dim": 24, "num_key_value_heads": None}),
        ("phi3", {"rope_parameters": None, "partial_rotary_factor": 0.5, "head_dim": 24}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}),
        ("qwen3", {"use_sliding_window": False, "sliding_window": 7}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 9}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9}),
        ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 3, "mlp_only_layers": [0], "norm_topk_prob": True}),
        ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 9}),
        ("olmo2", {"attention_bias": True, "num_key_value_heads": None}),
        ("glm4", {"attention_bias": False, "rope_parameters": None, "partial_rotary_factor": 0.25}),
        ("glm4_moe", {"n_routed_experts": 6, "num_experts_per_tok": 3, "first_k_dense_replace": 2, "n_group": 3}),
        ("glm4_moe", {"rope_parameters": None, "partial_rotary_factor": 0.25, "head_dim": 24, "use_qk_norm": True}),
        ("gpt_oss", {"num_local_experts": 6, "num_experts_per_tok": 3, "swiglu_limit": 5.0, "sliding_window": 7}),
        ("gpt_oss", {"rope_parameters": None, "rope_theta": 500.0, "attention_bias": False}),
        ("gemma3_text", {"rope_parameters": None, "final_logit_softcapping": 30.0, "sliding_window_pattern": 2}),
        (
            "gemma3_text",
            {"rope_parameters": None, "rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 8.0}},
        ),
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}),
    ],
)
def test_model_args_read_back_to_an_equal_config(model_type: str, change: dict[str, Any]) -> None:
    raw = HF | {"model_type": model_type} | change
    config = get_model_class(model_type).parse_config(raw)
    args = config.to_model_args()
    assert json.loads(json.dumps(args)) == args
    assert not {"num_hidden_layers", "num_attention_heads", "num_key_value_heads"} & args.keys()
    assert get_model_class(model_type).parse_config(args) == config
    assert pickle.loads(pickle.dumps(config)) == config


OWN: dict[str, Any] = {"logit_scale": 0.25, "norm_kind": "layer"}


def test_keys_of_a_familys_own_cross_model_args() -> None:
    config = ModelConfig.from_dict(HF | {"logit_scale": 0.0625}, own=OWN)
    assert config.own == {"logit_scale": 0.0625, "norm_kind": "layer"}
    assert config != ModelConfig.from_dict(HF, own=OWN)
    args = config.to_model_args()
    assert json.loads(args["own_config"]) == config.own
    assert ModelConfig.from_dict(args, own=OWN) == config
    assert "own_config" not in ModelConfig.from_dict(HF).to_model_args()
    hash(config)


@pytest.mark.parametrize(
    ("own_config", "message"),
    [
        (None, "config has n_layers, a name of ModelArgs, but no own_config with logit_scale, norm_kind"),
        ('{"logit_scale": 1.0}', "no own_config with norm_kind"),
        ("[1]", r"own_config in config must be a JSON object, got '\[1\]'"),
        ("{", "own_config in config must be a JSON object, got '{'"),
    ],
)
def test_model_args_that_lost_a_familys_own_keys_are_refused(own_config: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(ARGS | {"own_config": own_config}, own=OWN)


@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({}, 0),
        ({"sliding_window": 7}, 7),  # as most families write it, who have no flag
        ({"sliding_window": 7, "use_sliding_window": False}, 0),
        ({"sliding_window": None}, 0),
    ],
)
def test_a_window_that_is_given_is_used(change: dict[str, Any], window: int) -> None:
    assert ModelConfig.from_dict(HF | change).window(0) == window


@pytest.mark.parametrize("hf", [LlamaConfig(), Qwen3Config(), LlamaConfig(head_dim=96), Qwen3Config(head_dim=64)])
def test_configs_as_transformers_writes_them(hf: Any, tmp_path: Path) -> None:
    hf.save_pretrained(tmp_path)
    raw = read_config(tmp_path)
    config = get_model_class(hf.model_type).parse_config(raw)
    assert config.head_dim == hf.head_dim
    assert config.num_heads == hf.num_attention_heads
    assert config.num_kv_heads == hf.num_key_value_heads
    assert config.rms_norm_eps == hf.rms_norm_eps
    assert config.rope.theta == hf.rope_parameters["rope_theta"]
    assert config.tie_word_embeddings == hf.tie_word_embeddings
    assert config.sliding_window == 0


def gemma(**change: Any) -> ModelConfig:
    raw = {key: value for key, value in HF.items() if key != "rope_parameters"} | {"num_hidden_layers": 7}
    return get_model_class("gemma3_text").parse_config(raw | change)


def test_rope_parameters_per_layer_type() -> None:
    nested = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    older = {"rope_theta": 1e6, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    for raw in ({"rope_parameters": nested}, older):
        config = gemma(**raw)
        assert config.rope == RopeConfig(rope_type="linear", theta=1e6, factor=8.0)
        assert config.sliding_rope == RopeConfig(theta=2e4)
    assert gemma().sliding_rope == RopeConfig(theta=1e4)
    assert gemma(rope_parameters={"full_attention": {"rope_type": "default"}}).rope == RopeConfig(theta=1e6)
    assert [gemma().slides(layer) for layer in range(7)] == [True] * 5 + [False, True]
    nested["sliding_attention"] = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(ValueError, match="rope type 'linear' of sliding_attention layers"):
        gemma(rope_parameters=nested)
    nested = {"full_attention": {"rope_type": "yarn", "factor": 4.0}, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(ValueError, match="original_max_position_embeddings 8 must be in the rope parameters of full"):
        gemma(rope_parameters=nested, original_max_position_embeddings=8)
    with pytest.raises(ValueError, match=r"rope parameters for layer types \['chunked_attention'\]"):
        gemma(rope_parameters={"chunked_attention": {}})


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_early_names_of_longrope(name: str) -> None:
    scaling = {"type": name} | {key: value for key, value in LONGROPE.items() if key != "rope_type"}
    raw = {key: value for key, value in HF.items() if key != "rope_parameters"}
    config = ModelConfig.from_dict(raw | {"rope_scaling": scaling, "original_max_position_embeddings": 16})
    assert config.rope.rope_type == "longrope"
    assert config.rope.long_factor == (2.0, 3.0, 4.0, 5.0)
    assert (config.rope.factor, config.rope.original_max_position_embeddings) == (4.0, 16)


def test_a_family_fills_what_its_config_json_may_omit() -> None:
    raw = HF | {"model_type": "qwen3", "use_sliding_window": True}
    config = get_model_class("qwen3").parse_config(raw)
    assert (config.head_dim, config.sliding_window, config.max_window_layers) == (128, 4096, 28)
    explicit = get_model_class("qwen3").parse_config(raw | {"head_dim": 8, "sliding_window": None})
    assert (explicit.head_dim, explicit.sliding_window) == (8, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_heads": 8}, "contradictory keys in config: num_attention_heads=4, n_heads=8"),
        ({"n_layers": 3}, "contradictory keys in config: num_hidden_layers=2, n_layers=3"),
        ({"torch_dtype": "float16"}, "contradictory keys in config: dtype='bfloat16', torch_dtype='float16'"),
        ({"eos_token_ids": [7]}, "contradictory keys in config: eos_token_id"),
        ({"dtype": "float7"}, r"dtype 'float7' is not supported; supported: \['float32', 'float16', 'bfloat16'\]"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported"),
        ({"hidden_size": None}, "config has no hidden_size"),
        ({"num_hidden_layers": None}, "config has no num_hidden_layers or n_layers"),
        ({"hidden_size": "32"}, "hidden_size in config must be an integer, got '32'"),
        ({"num_hidden_layers": True}, "num_hidden_layers in config must be an integer, got True"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings in config must be true or false, got 1"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps in config must be a number"),
        ({"model_type": 3}, "model_type in config must be a string"),
        ({"eos_token_id": ["2"]}, "eos_token_id in config must be an integer or a list"),
        ({"architectures": [1]}, "architectures in config must be a list of strings"),
        ({"num_attention_heads": 5}, "hidden_size 32 is not divisible by num_attention_heads 5"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not divisible by num_kv_heads 3"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ({"use_sliding_window": True}, "config has no sliding_window"),
        ({"num_experts": 4}, "config has no num_experts_per_tok"),
        (EXPERTS | {"num_experts_per_tok": 5}, "num_experts_per_tok 5 is outside 1 to num_experts 4"),
        (EXPERTS | {"decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1, got 0"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern must be at least 1, got 0"),
        ({"rope_parameters": LONGROPE | {"long_factor": 2.0}}, "long_factor in the rope parameters must be a list"),
        ({"rope_parameters": LONGROPE | {"long_factor": ["2"]}}, "long_factor .* must be a list of numbers"),
    ],
)
def test_bad_configs_name_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(HF | change)


def test_equal_values_under_both_names_are_no_contradiction() -> None:
    both = HF | {"n_heads": 4, "n_layers": 2, "torch_dtype": "bfloat16", "eos_token_ids": [2, 3]}
    assert ModelConfig.from_dict(both) == ModelConfig.from_dict(HF)


def test_generation_config_adds_eos_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF | {"eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert ModelConfig.from_dict(read_config(tmp_path)).eos_token_ids == (2, 5)


def test_a_directory_or_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        read_config(tmp_path)
