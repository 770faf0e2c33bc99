"""Checkpoints of several models (text and vision): the text model's configuration and weights, against HF."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from xllm_models import (
    DictStateDict,
    WeightError,
    WeightMap,
    get_model_class,
    load_model,
    read_model_config,
    register_port,
    registry,
)
from xllm_models.__main__ import main
from xllm_models.models.llama import LlamaForCausalLM

TOLERANCE = 5e-6  # of the largest logit, in fp32

TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA: dict[str, Any] = {
    "text_config": TEXT | {"sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    "vision_config": VISION | {"model_type": "siglip_vision_model"},
    "mm_tokens_per_image": 4,
    "image_token_index": 96,
}
MISTRAL: dict[str, Any] = {
    "text_config": TEXT | {"model_type": "mistral", "sliding_window": 5},
    "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
    "image_token_index": 96,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
}
QWEN_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
QWEN2: dict[str, Any] = {
    "text_config": TEXT
    | {"rope_parameters": QWEN_ROPE, "use_sliding_window": True, "sliding_window": 5}
    | {"max_window_layers": 1},
    "vision_config": QWEN_VISION,
    "image_token_id": 96,
}
QWEN3: dict[str, Any] = {
    "text_config": TEXT | {"rope_parameters": QWEN_ROPE | {"mrope_interleaved": True}, "attention_bias": True},
    "vision_config": QWEN_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    "image_token_id": 96,
}
FAMILIES = {
    "gemma3": GEMMA,
    "mistral3": MISTRAL,
    "qwen2_vl": QWEN2 | {"vision_config": {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32}},
    "qwen2_5_vl": QWEN2,
    "qwen3_vl": QWEN3,
}


@pytest.fixture(scope="module")
def write_nested(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[PreTrainedModel, Path]]:
    """(model_type, save_original_format, **config) -> a random HF model and its directory."""

    def write(model_type: str, *, original: bool = True, **change: Any) -> tuple[PreTrainedModel, Path]:
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **(json.loads(json.dumps(FAMILIES[model_type])) | change))
        hf = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in hf.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
        directory = tmp_path_factory.mktemp(model_type)
        hf.save_pretrained(directory, save_original_format=original)
        return hf, directory

    return write


def rename(directory: Path, name_of: Callable[[str], str]) -> None:
    """Change the names of the checkpoint's tensors."""
    path = directory / "model.safetensors"
    save_file({name_of(name): tensor for name, tensor in load_file(path).items()}, path)


def check(hf: PreTrainedModel, directory: Path, paged: ModuleType) -> None:
    """Our logits equal those of HF's forward without images."""
    texts = paged.texts(97)
    with torch.no_grad():
        want = [hf(input_ids=torch.tensor([text])).logits[0] for text in texts]
    for sequence, start, logits in paged.run_steps(load_model(directory)):
        expected = want[sequence][start : start + len(logits)]
        assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("original", [False, True], ids=["renamed", "original"])
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_text_models_of_nested_checkpoints_equal_hf(
    model_type: str,
    original: bool,
    tied: bool,
    write_nested: Callable[..., Any],
    paged: ModuleType,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hf, directory = write_nested(model_type, original=original, tie_word_embeddings=tied)
    with caplog.at_level(logging.WARNING, logger="xllm_models"):
        check(hf, directory, paged)
    (line,) = [record.getMessage() for record in caplog.records if "ignores" in record.getMessage()]
    assert "visual.*" in line or ("of *vision_tower.*, " in line and "of *multi_modal_projector.*" in line)


def test_a_flat_config_of_a_vision_model_as_published(write_nested: Callable[..., Any], paged: ModuleType) -> None:
    """As Qwen/Qwen2.5-VL-7B-Instruct has it: no text_config, and the rope type mrope."""
    _, directory = write_nested("qwen2_5_vl")
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    text = {key: value for key, value in TEXT.items() if key != "head_dim"}
    rope = {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    flat = {"architectures": raw["architectures"], "model_type": "qwen2_5_vl", "vision_config": raw["vision_config"]}
    path.write_text(json.dumps(flat | text | rope | {"tie_word_embeddings": False, "torch_dtype": "float32"}))
    names = list(load_file(directory / "model.safetensors"))
    assert "model.layers.0.mlp.up_proj.weight" in names
    assert any(name.startswith("visual.") for name in names)
    check(AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager").eval(), directory, paged)


SPELLINGS: dict[str, Callable[[str], str]] = {
    "language_model.model. and lm_head.": lambda name: (
        name.replace("model.", "language_model.model.", 1) if name.startswith("model.") else name
    ),
    "language_model. for all": lambda name: f"language_model.{name}",
    "model.language_model.": lambda name: (
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
    ),
    "language_model. for model.": lambda name: (
        name.replace("model.", "language_model.", 1) if name.startswith("model.") else name
    ),
}


@pytest.mark.parametrize("spelling", sorted(SPELLINGS))
@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text"])
def test_every_spelling_of_the_prefix_loads(
    model_type: str, spelling: str, write_checkpoint: Callable[..., Any], paged: ModuleType
) -> None:
    _, directory = write_checkpoint(model_type, head_dim=8)
    want = load_model(directory).state_dict()
    rename(directory, SPELLINGS[spelling])
    got = load_model(directory).state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


class PrefixedForCausalLM(LlamaForCausalLM):
    weight_map = WeightMap(
        prefix="thinker.",
        fused=LlamaForCausalLM.weight_map.fused,
        tied=LlamaForCausalLM.weight_map.tied,
    )


class PlainStateDict:
    """A state dict that cannot read slices."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._dict = DictStateDict(tensors)
        self.has, self.get_tensor, self.keys = self._dict.has, self._dict.get_tensor, self._dict.keys


def test_prefixes_of_state_dicts_in_memory(write_checkpoint: Callable[..., Any]) -> None:
    _, directory = write_checkpoint("llama", head_dim=8)
    plain = load_model(directory)
    tensors = load_file(directory / "model.safetensors")
    raw = json.loads((directory / "config.json").read_text())
    model = PrefixedForCausalLM(raw)
    model.load_weights([PlainStateDict({f"thinker.{name}": tensor for name, tensor in tensors.items()})])
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())
    twice = tensors | {"thinker.lm_head.weight": tensors["lm_head.weight"]}
    with pytest.raises(WeightError, match=r"two spellings: lm_head\.weight and thinker\.lm_head\.weight"):
        model.load_weights([DictStateDict(twice)])
    other_file = {"thinker.lm_head.weight": tensors["lm_head.weight"]}
    with pytest.raises(WeightError, match=r"in more than one file: lm_head\.weight"):
        model.load_weights([DictStateDict(tensors), DictStateDict(other_file)])
    with pytest.raises(ValueError, match="prefix 'thinker' must be a module's name and a dot"):
        WeightMap(prefix="thinker")


PREFIXED: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama": {"tie_word_embeddings": True},
    "phi3": {"pad_token_id": None},  # one tensor for q, k and v
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4},  # renamed too
}


@pytest.mark.parametrize("original", [False, True], ids=["renamed", "original"])
@pytest.mark.parametrize("model_type", sorted(PREFIXED))
def test_fused_stacked_and_tied_names_have_the_prefix(
    model_type: str, original: bool, write_checkpoint: Callable[..., Any]
) -> None:
    hf, directory = write_checkpoint(model_type, **PREFIXED[model_type])
    hf.save_pretrained(directory, save_original_format=original)  # of experts: one tensor each, or one for all
    want = load_model(directory).state_dict()
    family = get_model_class(model_type)
    prefixed = type("Prefixed", (family,), {"weight_map": replace(family.weight_map, prefix="thinker.")})
    model = prefixed(json.loads((directory / "config.json").read_text()))
    tensors = load_file(directory / "model.safetensors")
    model.load_weights([DictStateDict({f"thinker.{name}": tensor for name, tensor in tensors.items()})])
    assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())


def test_prefixed_fp8_weights_are_dequantized(write_checkpoint: Callable[..., Any]) -> None:
    _, directory = write_checkpoint("mistral", head_dim=8)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.tensor([0.5])
    raw = json.loads((directory / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8"}
    model = get_model_class("mistral")(raw)
    model.load_weights([DictStateDict(tensors)])
    want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    nested = {"text_config": raw, "quantization_config": raw.pop("quantization_config")}
    model = get_model_class("mistral3")(nested | {"architectures": raw["architectures"], "model_type": "mistral3"})
    model.load_weights([DictStateDict({f"language_model.{name}": tensor for name, tensor in tensors.items()})])
    assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())


def test_a_sharded_rank_reads_its_part(write_nested: Callable[..., Any], write_checkpoint: Callable[..., Any]) -> None:
    _, directory = write_nested("mistral3")
    whole = load_model(directory).state_dict()
    part = load_model(directory, tp_rank=1, tp_size=2).state_dict()
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(part[name], whole[name][:, 24:])


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_keys_outside_of_text_config_count(model_type: str, write_nested: Callable[..., Any]) -> None:
    _, directory = write_nested(model_type)
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    raw.pop("dtype")
    (directory / "generation_config.json").unlink()
    raw["text_config"] |= {"dtype": "float32", "eos_token_id": 7}
    outer = {"torch_dtype": "bfloat16", "eos_token_id": [3, 4], "tie_word_embeddings": False}
    quantization = {"quantization_config": {"quant_method": "fp8"}}
    path.write_text(json.dumps(raw | outer | quantization))
    model_class, config = read_model_config(directory)
    assert config.dtype == torch.bfloat16
    assert config.eos_token_ids == (3, 4)
    assert not config.tie_word_embeddings
    assert config.quantization is not None
    assert config.architecture == raw["architectures"][0]
    assert config.model_type == model_type
    assert model_class is get_model_class(config.architecture) is get_model_class(model_type)
    assert model_class.parse_config(config.to_model_args() | {"quantization_config": {"quant_method": "fp8"}}) == config
    for key in (*outer, *quantization):
        raw.pop(key, None)
    raw["text_config"] |= {"tie_word_embeddings": True} | quantization
    path.write_text(json.dumps(raw))
    _, config = read_model_config(directory)
    assert config.dtype == torch.float32
    assert config.eos_token_ids == (7,)
    assert config.tie_word_embeddings
    assert config.quantization is not None


def test_a_sparse_text_config_gets_hf_s_defaults() -> None:
    """As google/gemma-3-4b-it lists it."""
    sparse = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    hf = AutoConfig.for_model("gemma3", text_config=json.loads(json.dumps(sparse))).text_config
    config = get_model_class("gemma3").parse_config({"model_type": "gemma3", "text_config": sparse})
    names = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings", "rms_norm_eps")
    for name in (*names, "sliding_window", "query_pre_attn_scalar", "tie_word_embeddings", "attention_bias"):
        assert getattr(config, name) == getattr(hf, name)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (34, 8, 4)
    assert config.layer_types == tuple(hf.layer_types)
    assert config.rope.theta == hf.rope_parameters["full_attention"]["rope_theta"]
    assert (config.rope.rope_type, config.rope.factor) == ("linear", 8.0)
    assert config.sliding_rope is not None
    assert config.sliding_rope.theta == hf.rope_parameters["sliding_attention"]["rope_theta"]


@pytest.mark.parametrize(
    ("model_type", "text", "message"),
    [
        ("mistral3", {"model_type": "ministral3"}, "model_type 'ministral3' of text_config .* supported: mistral"),
        (
            "mistral3",
            {"model_type": "mistral", "layer_types": ["full_attention"]},
            r"layer_types \['full_attention'\] in text_config is not supported; it must be absent",
        ),
        ("gemma3", {"model_type": "gemma2"}, "model_type 'gemma2' of text_config .* supported: gemma3_text"),
        ("gemma3", 7, "text_config in config must be a mapping, got 7"),
    ],
)
def test_unknown_text_models_are_refused_by_name(model_type: str, text: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_model_class(model_type)({"model_type": model_type, "text_config": text})


class OwnKeysForCausalLM(LlamaForCausalLM):
    """A family whose config.json has another name for the size of its MLP."""

    @classmethod
    def parse_config(cls, raw: Any) -> Any:
        return super().parse_config({"intermediate_size": raw.get("ffn_hidden_size")} | raw)


@pytest.mark.parametrize("nested", [False, True])
def test_a_family_s_own_parse_config_serves_every_caller(
    nested: bool,
    write_checkpoint: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, directory = write_checkpoint("llama", head_dim=8)
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    raw["ffn_hidden_size"] = raw.pop("intermediate_size")
    raw["architectures"] = ["OwnKeysForCausalLM"]
    if nested:
        raw = {"architectures": raw["architectures"], "model_type": "own_keys", "text_config": raw}
    path.write_text(json.dumps(raw))
    monkeypatch.setattr(registry, "_registered", {})
    sys.modules["own_keys"] = sys.modules[__name__]
    register_port("own_keys:OwnKeysForCausalLM", directory)
    assert isinstance(load_model(directory), OwnKeysForCausalLM)
    assert OwnKeysForCausalLM(raw).config == read_model_config(directory)[1]
    # compare reads the vocabulary through the family too: the only fault is that of the prompt.
    assert main(["compare", str(directory), "--prompt-ids", "97"]) == 2
    assert "each below the vocabulary of 97" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("original", [False, True], ids=["renamed", "original"])
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_compare_matches_the_text_model(
    model_type: str, original: bool, dtype: str, write_nested: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    _, directory = write_nested(model_type, original=original)
    ids = ",".join(str(one) for one in range(24))
    assert main(["compare", str(directory), "--prompt-ids", ids, "--dtype", dtype]) == 0
    out = capsys.readouterr().out
    assert "without a counterpart" not in out
    assert "model.layers.2.self_attn.attn.q" in out
