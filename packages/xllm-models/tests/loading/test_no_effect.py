"""Tensors that have no effect: every spelling of exporters loads, and a value that breaks the condition is named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from xllm_models import DictStateDict, WeightError, load_model
from xllm_models.models.llama import LlamaForCausalLM

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 32,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "rope_theta": 500.0,
}
FP8 = {"quantization_config": {"quant_method": "fp8"}}
GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 16}}
AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 16}}
ATTENTION = "model.layers.0.self_attn."
FREQUENCIES = 500.0 ** -(torch.arange(0, 8, 2) / 8)
SCALE = torch.tensor(0.05)
ANGLES = torch.arange(16).unsqueeze(1) * torch.cat((FREQUENCIES, FREQUENCIES))
MASK = torch.ones(1, 1, 16, 16).tril()

Case = tuple[str, torch.Tensor, dict[str, Any]]  # name, values, change of the config

# As vLLM, compressed-tensors, AutoFP8, llm-compressor, ModelOpt, Quark, AutoGPTQ and old transformers write them.
INERT: list[Case] = [
    *(
        (ATTENTION + name, SCALE, FP8)
        for name in (
            "k_scale",
            "v_scale",
            "q_scale",
            "kv_scale",
            "prob_scale",
            "attn.k_scale",
            "attn.v_scale",
            "attn.q_scale",
            "attn.prob_scale",
            "k_proj.k_scale",
            "v_proj.v_scale",
            "qkv_proj.k_scale",
            "k_proj.output_scale",
            "v_proj.output_scale",
            "q_proj.output_scale",
            "prob_output_scale",
            "k_zero_point",
            "k_proj.kv_cache_scale",
            "k_proj.kv_cache_offset",
            "v_cache.scale",
            "k_bmm_quantizer._amax",
        )
    ),
    (ATTENTION + "k_scale", torch.full((2,), 0.05), FP8),  # per head
    (ATTENTION + "k_scale", torch.full((2, 1, 1), 0.05), FP8),
    (ATTENTION + "q_scale", torch.full((4, 1), 0.05), FP8),
    (ATTENTION + "v_scale", torch.full((16,), 0.05), FP8),  # per channel
    *(
        (f"model.layers.0.mlp.up_proj.{name}", SCALE, FP8)
        for name in (
            "input_scale",
            "act_scale",
            "activation_scale",
            "input_zero_point",
            "input_global_scale",
            "input_scale_ub",
            "output_scale",
            "input_quantizer._amax",
        )
    ),
    (f"{ATTENTION}rotary_emb.inv_freq", FREQUENCIES, {}),
    (f"{ATTENTION}rotary_emb.inv_freq", FREQUENCIES.half(), {}),
    (f"{ATTENTION}rotary_emb.inv_freq", FREQUENCIES.bfloat16(), {}),
    ("model.rotary_emb.inv_freq", FREQUENCIES, {}),
    ("model.rotary_emb.original_inv_freq", FREQUENCIES, {}),
    ("model.rotary_pos_emb.inv_freq", FREQUENCIES, {}),
    ("model.rotary_emb.inv_freq", FREQUENCIES, {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("model.rotary_emb.inv_freq", FREQUENCIES / 4, {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("model.rotary_emb.inv_freq", FREQUENCIES, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    (f"{ATTENTION}rotary_emb.cos_cached", ANGLES.cos().view(1, 1, 16, 8), {}),
    (f"{ATTENTION}rotary_emb.sin_cached", ANGLES.sin(), {}),
    (f"{ATTENTION}rotary_emb.cos_cached", ANGLES[:, :4].cos().bfloat16(), {}),
    ("model.layers.0.attn.masked_bias", torch.tensor(-1e4), {}),
    ("model.layers.0.attention.masked_bias", torch.tensor(-1e9), {}),
    ("model.layers.0.attn.bias", MASK.bool(), {}),
    ("model.layers.0.attn.bias", MASK.byte(), {}),
    ("model.layers.0.attention.bias", MASK.half(), {}),
    ("model.layers.0.self_attn.bias", torch.zeros(32), {}),
    ("model.embeddings.position_ids", torch.arange(16).unsqueeze(0), {}),
    ("position_ids", torch.arange(5), {}),
    (f"{ATTENTION}q_proj.bias", torch.zeros(32), {}),
    (f"{ATTENTION}o_proj.bias", torch.zeros(32, dtype=torch.float16), GPTQ),
    ("model.norm.bias", torch.zeros(32), {}),
    (f"{ATTENTION}q_proj.weight_zero_point", torch.zeros(32, 1, dtype=torch.int8), FP8),
    (f"{ATTENTION}q_proj.weight_scale", torch.ones(1), FP8),
    (f"{ATTENTION}q_proj.weight_scale", torch.ones(32, 1), {}),
    (f"{ATTENTION}q_proj.g_idx", torch.arange(32) // 16, AWQ),
    (f"{ATTENTION}q_proj.weight_g_idx", torch.full((32,), -1), FP8),
    ("mtp.layers.0.self_attn.q_proj.weight", torch.randn(3), {}),
    ("model.layers.1.eh_proj.weight", torch.randn(3), {"num_nextn_predict_layers": 1}),
    (f"{ATTENTION}_extra_state", torch.empty(0, dtype=torch.uint8), {}),
]

REFUSED: list[tuple[str, torch.Tensor, dict[str, Any], str]] = [
    (
        ATTENTION + "k_scale",
        SCALE,
        {},
        "keys, values or queries that it scales have the model's dtype; config.json has no quantization_config",
    ),
    (ATTENTION + "q_scale", torch.ones(8), FP8, "its shape [8] is not one per tensor, head or channel"),
    ("model.layers.0.mlp.up_proj.input_scale", SCALE, {}, "config.json has no quantization_config"),
    ("model.rotary_emb.inv_freq", FREQUENCIES.roll(1), {}, "those of the config's rope parameters; its relative diff"),
    ("model.rotary_emb.inv_freq", FREQUENCIES * 1.05, {}, "its relative difference is up to 0.05"),
    ("model.rotary_emb.inv_freq", FREQUENCIES[:3], {}, "the model has no rotary embedding with 3 frequencies"),
    ("model.rotary_emb.cos_cached", ANGLES.sin(), {}, "it is computed from the config's rope parameters; it differs"),
    ("model.layers.0.attn.masked_bias", torch.tensor(-1.0), {}, "at -10000 or less; it holds [-1.0]"),
    ("model.layers.0.attn.bias", torch.ones(1, 1, 16, 16), {}, "its shape is [1, 1, 16, 16], and it is not lower"),
    ("model.layers.0.attn.bias", MASK.tril(-1), {}, "it is not lower triangular with ones"),
    ("model.layers.0.attn.bias", torch.randn(4, 16, 16), {}, "its shape is [4, 16, 16]"),
    ("model.embeddings.position_ids", torch.arange(2, 18), {}, "it counts from 0; it holds [2, 3, 4, 5] and 12 more"),
    (f"{ATTENTION}q_proj.bias", torch.tensor([0.0, 0.5]), {}, "it holds [0.5]"),
    (f"{ATTENTION}q_proj.bias", torch.tensor([torch.nan]), {}, "it holds [nan]"),
    (f"{ATTENTION}q_proj.weight_zero_point", torch.tensor([3], dtype=torch.int8), FP8, "it is 0; it holds [3]"),
    (f"{ATTENTION}q_proj.weight_scale", torch.full((1,), 0.5), FP8, "it is 1; it holds [0.5]"),
    (f"{ATTENTION}q_proj.g_idx", torch.tensor([1, 0] * 16), AWQ, "order of their groups; it holds [1, 0, 1, 0] and 28"),
    (f"{ATTENTION}_extra_state", torch.ones(7, dtype=torch.uint8), {}, "it is empty; it has 7 bytes"),
]


def build(config: dict[str, Any]) -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    """A model, and a checkpoint for it."""
    model = LlamaForCausalLM(CONFIG | config)
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (11, 32), "model.norm.weight": (32,), "lm_head.weight": (11, 32)}
    layer = "model.layers.0."
    shapes |= {f"{layer}{name}_layernorm.weight": (32,) for name in ("input", "post_attention")}
    shapes |= {f"{layer}self_attn.{x}_proj.weight": (16 if x in "kv" else 32, 32) for x in "qkvo"}
    shapes |= {f"{layer}mlp.{x}_proj.weight": (12, 32) for x in ("gate", "up")}
    shapes[f"{layer}mlp.down_proj.weight"] = (32, 12)
    return model, {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize(("name", "values", "config"), INERT)
def test_a_tensor_without_effect_is_not_loaded_and_logged(
    name: str, values: torch.Tensor, config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, tensors = build(config)
    model.load_weights([DictStateDict(tensors | {name: values})])
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
    (message,) = [record.getMessage() for record in caplog.records if "without effect" in record.getMessage()]
    assert f"tensors without effect: 1, for example {name} (" in message


@pytest.mark.parametrize(("name", "values", "config", "message"), REFUSED)
def test_a_tensor_that_would_have_an_effect_is_refused(
    name: str, values: torch.Tensor, config: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, tensors = build(config)
    with pytest.raises(WeightError, match=rf"would have an effect: {re.escape(name)} \(.*{re.escape(message)}"):
        model.load_weights([DictStateDict(tensors | {name: values})])
    assert not [record for record in caplog.records if "without effect" in record.getMessage()]


@pytest.mark.parametrize(
    "name", ["model.layers.1.eh_proj.weight", "model.layers.0.self_attn.k_scales", "model.inv_freq_proj", "another"]
)
def test_other_tensors_stay_unexpected(name: str) -> None:
    model, tensors = build({})
    with pytest.raises(WeightError, match=rf"  unexpected: {re.escape(name)}$"):
        model.load_weights([DictStateDict(tensors | {name: torch.zeros(1)})])


def test_each_kind_is_logged_once_with_its_number(caplog: pytest.LogCaptureFixture) -> None:
    model, tensors = build(FP8)
    scales = {f"{ATTENTION}{x}_scale": SCALE for x in "kvq"}
    inputs = {f"{ATTENTION}{x}_proj.input_scale": SCALE for x in "kvqo"}
    model.load_weights([DictStateDict(tensors | scales), DictStateDict(inputs)])
    messages = [record.getMessage() for record in caplog.records if "without effect" in record.getMessage()]
    assert [message.partition(" (")[0] for message in messages] == [
        f"tensors without effect: 3, for example {ATTENTION}k_scale",
        f"tensors without effect: 4, for example {ATTENTION}k_proj.input_scale",
    ]


class Unread(DictStateDict):
    """Tensors that must not be read."""

    def get_tensor(self, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read")


def test_tensors_without_a_condition_on_their_values_are_not_read() -> None:
    """A prediction head may be large, and quantized."""
    model, tensors = build({"num_nextn_predict_layers": 1})
    unread = Unread({name: torch.zeros(1) for name in ("mtp.fc.weight", "model.layers.1.mlp.up_proj.weight")})
    model.load_weights([DictStateDict(tensors), unread])


def test_a_needed_bias_is_loaded_although_it_has_a_name_of_the_table() -> None:
    model, tensors = build({"attention_bias": True})
    biases = {f"{ATTENTION}{x}_proj.bias": torch.randn(16 if x in "kv" else 32) for x in "qkvo"}
    model.load_weights([DictStateDict(tensors | biases)])
    want = torch.cat([biases[f"{ATTENTION}{x}_proj.bias"] for x in "qkv"])
    assert torch.equal(model.get_parameter(f"{ATTENTION}qkv_proj.bias"), want)


def test_a_plain_weight_with_a_scale_is_not_multiplied(write_checkpoint: Callable[..., Any]) -> None:
    """As it was before: any weight with a scale next to it was taken for fp8."""
    _, directory = write_checkpoint("llama")
    tensors = load_file(directory / "model.safetensors")
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | FP8))
    scale = "model.layers.0.mlp.up_proj.weight_scale"
    save_file(tensors | {scale: torch.tensor([0.5])}, directory / "model.safetensors")
    with pytest.raises(
        WeightError, match=rf"{re.escape(scale)} \(scale of a weight that is not quantized has no effect"
    ):
        load_model(directory)


KV_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor"}
FP8_GROUP = {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "AutoFP8": {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"},
    "llm-compressor": {"quant_method": "compressed-tensors", "config_groups": FP8_GROUP, "kv_cache_scheme": KV_CACHE},
    "ModelOpt": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": KV_CACHE},
}


QUANTIZATIONS["ModelOpt, own file"] = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
ONLY_THE_CACHE: dict[str, dict[str, Any]] = {
    "llm-compressor, only the cache": {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": KV_CACHE,
    },
    "ModelOpt, only the cache": {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
}


@pytest.mark.parametrize("exporter", [*QUANTIZATIONS, *ONLY_THE_CACHE])
def test_a_checkpoint_with_a_quantized_cache_runs_as_without(
    exporter: str, write_checkpoint: Callable[..., Any], tmp_path: Path, paged: ModuleType
) -> None:
    _, plain = write_checkpoint("qwen3", head_dim=8)
    weights = load_file(plain / "model.safetensors")
    raw = json.loads((plain / "config.json").read_text())
    scales = {f"model.layers.{i}.self_attn.{x}_scale": torch.tensor(0.07) for i in range(2) for x in "kv"}
    quantized = dict(weights)
    config = (QUANTIZATIONS | ONLY_THE_CACHE)[exporter]
    if exporter in QUANTIZATIONS:
        for name in [name for name in weights if "_proj." in name]:
            quantized[name] = (weights[name] / 0.002).clamp(-448, 448).to(torch.float8_e4m3fn)
            weights[name] = quantized[name].float() * torch.tensor(0.002)
            rows = len(quantized[name]) if exporter == "llm-compressor" else 1
            quantized[f"{name}_scale"] = torch.full((rows, 1) if rows > 1 else (), 0.002)
            if exporter != "llm-compressor":
                quantized[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(0.01)
    own_file = exporter == "ModelOpt, own file"
    in_config = {} if own_file else {"quantization_config": config}
    for directory, tensors, extra in (("q", quantized | scales, in_config), ("plain", weights, {})):
        (tmp_path / directory).mkdir()
        save_file(tensors, tmp_path / directory / "model.safetensors")
        (tmp_path / directory / "config.json").write_text(json.dumps(raw | extra))
    if own_file:
        (tmp_path / "q" / "hf_quant_config.json").write_text(json.dumps({"quantization": config}))
    steps = zip(*(paged.run_steps(load_model(tmp_path / name)) for name in ("q", "plain")), strict=True)
    assert all(torch.equal(ours, want) for (_, _, ours), (_, _, want) in steps)
    for rank in range(2):
        load_model(tmp_path / "q", tp_rank=rank, tp_size=2)
