"""What a config.json declares about attention is done as in transformers, or refused by name.

The reference is HF's model of the same directory: its logits, or its refusal.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from xllm_models import ModelConfig, get_model_class, load_model
from xllm_models.config import OPTIONAL_KEYS

PAGE = Path(__file__).parents[3] / "docs" / "config.md"

TOLERANCE = 5e-6  # of the largest logit, in fp32
# Some random configurations amplify rounding: HF in fp32 is up to 5.2e-6 from HF in fp64 here.
RANDOM_TOLERANCE = 2e-5
# Linear attention divides keys by their norms, and its states carry the rounding of all earlier tokens: HF in fp32 is
# up to 5.3e-5 from float64 with such weights.
LINEAR_TOLERANCE = 5e-4

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LATENT: dict[str, Any] = {
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
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 8, "sliding_window_pattern": 2},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "glm4": {"head_dim": 8, "pad_token_id": None},
    "glm4_moe": {"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "llama": {},
    "mistral": {"head_dim": 8},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"head_dim": 8, "num_local_experts": 4},
    "olmo2": {},
    "phi3": {"pad_token_id": None},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen3_next": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "qwen3_5_text": {
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
# Refused here, although HF's model runs: it ignores the key in silence, or computes what no kernel here does. The text
# is in the error.
STRICTER: dict[str, tuple[tuple[str, ...], str]] = {
    "two numbers of experts": (("deepseek_v2",), "contradictory keys in config: num_experts=4, n_routed_experts="),
    "chunked layer types": (
        ("deepseek_v2", "deepseek_v3", "glm4", "glm4_moe", "llama", "mixtral", "olmo2", "phi3", "qwen3_moe"),
        "layer_types has 'chunked_attention' for layer 0",
    ),
    "rope per layer type": (
        ("deepseek_v2", "deepseek_v3", "glm4", "glm4_moe", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen3_moe"),
        "rope_parameters per layer type",
    ),
    "per layer": (("qwen2", "qwen3"), "per_layer_config"),
    "hidden_act": (
        ("deepseek_v2", "deepseek_v3", "glm4_moe", "mixtral", "qwen3_moe", "qwen3_5_text", "qwen3_next"),
        "hidden_act 'gelu' of ",
    ),
    "soft cap of attention": (("gemma3_text",), "attn_logit_softcapping 5.0"),
    "bidirectional": (("gemma3_text",), "use_bidirectional_attention True"),
    "one rope for all layer types": (("gemma3_text",), "rope_parameters"),
    "partial rotary in rope_parameters": (("gemma3_text",), "rope_parameters"),
}


SLIDING, FULL = "sliding_attention", "full_attention"

# Each is merged into a config.json of three layers, 4 heads and head_dim 8.
CASES: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 5},
    "no window": {"sliding_window": None},
    "window and flag": {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0},
    "window and false flag": {"sliding_window": 5, "use_sliding_window": False},
    "flag and no window": {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0},
    "window from layer 1": {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    "first window layer alone": {"max_window_layers": 1},
    "layer types": {"sliding_window": 5, "use_sliding_window": True, "layer_types": [SLIDING, FULL, SLIDING]},
    "layer types against max_window_layers": {
        "sliding_window": 5,
        "use_sliding_window": True,
        "layer_types": [SLIDING, FULL, FULL],
        "max_window_layers": 2,
    },
    "layer types without flag": {"sliding_window": 5, "layer_types": [SLIDING, FULL, SLIDING]},
    "layer types and false flag": {"sliding_window": 5, "use_sliding_window": False, "layer_types": [SLIDING] * 3},
    "layer types without window": {"sliding_window": None, "layer_types": [SLIDING, FULL, SLIDING]},
    "full layer types": {"sliding_window": 5, "layer_types": [FULL] * 3},
    "layer types of another length": {"sliding_window": 5, "layer_types": [FULL] * 2},
    "chunked layer types": {"layer_types": ["chunked_attention", FULL, FULL]},
    "unknown layer types": {"layer_types": ["spiral_attention", FULL, FULL]},
    "old layer types": {"layer_types": ["attention", "attention", "attention"]},
    "pattern": {"sliding_window": 5, "sliding_window_pattern": 2},
    "pattern and flag": {"sliding_window": 5, "use_sliding_window": True, "sliding_window_pattern": 2},
    "pattern against layer types": {
        "sliding_window": 5,
        "use_sliding_window": True,
        "sliding_window_pattern": 2,
        "layer_types": [FULL, SLIDING, FULL],
    },
    "partial rotary": {"partial_rotary_factor": 0.5},
    "partial rotary in rope_parameters": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    },
    "partial rotary in rope_scaling": {
        "rope_parameters": None,
        "rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5},
    },
    "partial rotary and linear": {
        "rope_parameters": None,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "partial rotary of 1 and linear": {
        "rope_parameters": None,
        "partial_rotary_factor": 1.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "rope per layer type": {
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 500.0},
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        }
    },
    "one rope for all layer types": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "local theta": {"rope_parameters": None, "rope_theta": 1e4, "rope_local_base_freq": 100.0},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "scalar": {"query_pre_attn_scalar": 24},
    "soft cap of attention": {"attn_logit_softcapping": 5.0},
    "soft cap of logits": {"final_logit_softcapping": 5.0},
    "bidirectional": {"use_bidirectional_attention": True},
    "hidden_act": {"hidden_act": "gelu"},
    "hidden_activation": {"hidden_activation": "gelu"},
    "kv heads of null": {"num_key_value_heads": None},
    "experts": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "experts alone": {"num_local_experts": 4},
    "per layer": {"per_layer_config": {"1": {"sliding_window": 3}}},
}


def texts_of(hf: PreTrainedModel, paged: ModuleType) -> list[torch.Tensor]:
    with torch.no_grad():
        return [hf(torch.tensor([text]), use_cache=False).logits[0] for text in paged.texts(hf.config.vocab_size)]


def reference(directory: Path, paged: ModuleType) -> list[torch.Tensor] | None:
    """HF's logits for a checkpoint; None if it refuses it, in whatever way."""
    try:
        hf = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
        return texts_of(hf, paged)
    except Exception:  # noqa: BLE001  HF's refusals have many types
        return None


@pytest.fixture(scope="session")
def write_declared(write_checkpoint: Callable[..., Any]) -> Callable[..., Path]:
    """(family, config, change) -> a checkpoint whose config.json has just these keys, as an exporter wrote them."""

    def write(family: str, config: dict[str, Any], change: dict[str, Any]) -> Path:
        def copied(*parts: dict[str, Any]) -> dict[str, Any]:
            return {key: value for part in parts for key, value in json.loads(json.dumps(part)).items()}

        try:  # with the tensors of keys that HF reads, such as biases
            directory: Path = write_checkpoint(family, **copied(config, change))[1]
        except Exception:  # noqa: BLE001  see `reference`
            directory = write_checkpoint(family, **copied(config))[1]
        architectures = json.loads((directory / "config.json").read_text())["architectures"]
        raw = {"architectures": architectures, "model_type": family, "dtype": "float32"}
        (directory / "config.json").write_text(json.dumps(raw | config | change))
        (directory / "generation_config.json").unlink(missing_ok=True)
        return directory

    return write


def check(
    directory: Path, paged: ModuleType, want: list[torch.Tensor], tolerance: float = TOLERANCE, **options: Any
) -> None:
    for sequence, start, logits in paged.run_steps(load_model(directory, **options)):
        expected = want[sequence][start : start + len(logits)]
        assert (logits - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_declared_keys_give_hf_s_logits_or_an_error_that_names_them(
    family: str, case: str, write_declared: Callable[..., Path], paged: ModuleType
) -> None:
    directory = write_declared(family, SMALL | FAMILIES[family], CASES[case])
    want = reference(directory, paged)
    families, message = STRICTER.get(case, ((), ""))
    if family in families:
        with pytest.raises(ValueError, match=re.escape(message)):
            load_model(directory)
    elif want is None:
        names = (*CASES[case], "rope type", "k_proj")
        with pytest.raises(ValueError, match="|".join(names)):
            load_model(directory)
    else:
        check(directory, paged, want, LINEAR_TOLERANCE if "linear_num_key_heads" in FAMILIES[family] else TOLERANCE)


def test_random_configs_with_random_keys(
    family: str,
    number: int,
    draw_config: Callable[..., dict[str, Any]],
    write_declared: Callable[..., Path],
    paged: ModuleType,
) -> None:
    rng = Random(f"keys {family} {number}")
    change: dict[str, Any] = {}
    for _ in range(rng.randrange(1, 4)):
        change |= CASES[rng.choice([case for case in sorted(CASES) if "length" not in case])]
    config = draw_config(family, number)
    if len(change.get("layer_types", ())) != config["num_hidden_layers"]:
        change.pop("layer_types", None)
    directory = write_declared(family, config, change)
    want = reference(directory, paged)
    options = {"max_model_len": 24} if family == "phi3" else {}
    stricter = [message for _, message in STRICTER.values()]
    try:
        load_model(directory, **options)
        refused = ""
    except ValueError as error:
        refused = str(error)
    if want is None or any(message in refused for message in stricter):
        assert refused, change
    else:
        assert not refused, change
        check(
            directory,
            paged,
            want,
            LINEAR_TOLERANCE if "linear_num_key_heads" in config else RANDOM_TOLERANCE,
            **options,
        )


@pytest.mark.parametrize("family", [*sorted(FAMILIES), "ministral"])
def test_absent_keys_have_the_values_of_the_hf_class(family: str) -> None:
    sizes = {key: value for key, value in SMALL.items() if key not in ("num_key_value_heads", "tie_word_embeddings")}
    sizes |= {"num_attention_heads": 64, "hidden_size": 512, "num_hidden_layers": 30}
    if family == "deepseek_v2":  # whose class has no number of experts per token
        sizes["num_experts_per_tok"] = 2
    if family == "deepseek_v3":  # whose class has 128 kv heads
        sizes["num_attention_heads"] = 128
    hf = CONFIG_MAPPING[family](**sizes)
    config = get_model_class(family).parse_config({"model_type": family} | sizes)
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    assert (config.head_dim, config.num_kv_heads) == (head_dim, hf.num_key_value_heads)
    assert (config.rms_norm_eps, config.tie_word_embeddings) == (hf.rms_norm_eps, hf.tie_word_embeddings)
    assert config.hidden_act == getattr(hf, "hidden_activation", getattr(hf, "hidden_act", None))
    slides = [name == "sliding_attention" for name in getattr(hf, "layer_types", ["sliding_attention"] * 30)]
    window = getattr(hf, "sliding_window", None) or 0
    assert [config.window(layer_id) for layer_id in range(30)] == [window * one for one in slides]
    ropes = hf.rope_parameters if "full_attention" in hf.rope_parameters else {"full_attention": hf.rope_parameters}
    assert config.rope.theta == ropes["full_attention"]["rope_theta"]
    if config.sliding_rope is not None:
        assert config.sliding_rope.theta == ropes["sliding_attention"]["rope_theta"]
    if config.moe is not None:
        num_experts = getattr(hf, "num_experts", getattr(hf, "n_routed_experts", None))
        assert (config.moe.num_experts, config.moe.num_experts_per_token) == (num_experts, hf.num_experts_per_tok)
        assert config.moe.intermediate_size == getattr(hf, "moe_intermediate_size", hf.intermediate_size)
        assert config.moe.normalize == getattr(hf, "norm_topk_prob", True)
        assert config.moe.sparse_step == getattr(hf, "decoder_sparse_step", 1)
    # None: V2 has no groups.
    values = {key: getattr(hf, key) for key in config.own}
    assert config.own == {key: 1 if value is None else value for key, value in values.items()}


def keys_in_source(config_class: type) -> set[str]:
    source = inspect.getsource(config_class)
    return {key for key in OPTIONAL_KEYS if re.search(rf"\b{key}\b", source)}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_reads_the_optional_keys_of_its_hf_class(family: str) -> None:
    expected = keys_in_source(CONFIG_MAPPING[family])
    if family == "mistral":  # transformers reads a Mistral with layer_types as Ministral
        expected |= keys_in_source(CONFIG_MAPPING["ministral"])
    declared = get_model_class(family).optional_keys
    assert declared is not None
    # Qwen3-MoE reads the name of GLM and DeepSeek too.
    assert set(declared) - ({"n_routed_experts"} if family == "qwen3_moe" else set()) == expected


def test_keys_without_effect_are_reported_once(
    write_declared: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    change = {"sliding_window": 5, "partial_rotary_factor": 0.5, "attn_logit_softcapping": 5.0, "mlp_only_layers": []}
    directory = write_declared("llama", SMALL, change | {"use_bidirectional_attention": False, "num_experts": None})
    with caplog.at_level(logging.WARNING, logger="xllm_models"):
        load_model(directory)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "config keys without effect in LlamaForCausalLM, as in transformers: sliding_window=5, "
        "attn_logit_softcapping=5.0, partial_rotary_factor=0.5"
    )


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen3_moe", {"max_window_layers": 48, "use_sliding_window": False, "sliding_window": None}),
        ("mistral", {"sliding_window": None, "use_sliding_window": False, "attention_bias": False}),
        ("llama", {"hidden_activation": "silu", "hidden_act": "silu", "partial_rotary_factor": 1.0}),
        ("phi3", {"sliding_window": None, "layer_types": ["full_attention"] * 3, "use_sliding_window": True}),
    ],
)
def test_keys_whose_value_has_no_effect_anyway_are_not_reported(family: str, change: dict[str, Any]) -> None:
    config = get_model_class(family).parse_config({"model_type": family} | SMALL | FAMILIES[family] | change)
    assert config.unread == {}


def test_a_family_may_have_other_layer_types() -> None:
    raw = {"model_type": "other"} | SMALL | {"layer_types": ["attention", "conv", "full_attention"]}
    config = ModelConfig.from_dict(raw, layer_types=("full_attention", "conv"))
    assert config.layer_types == ("full_attention", "conv", "full_attention")
    with pytest.raises(ValueError, match=r"layer_types has 'conv' for layer 1, .* allowed: full_attention, sliding"):
        ModelConfig.from_dict(raw)


def test_the_page_lists_the_families_that_read_a_key() -> None:
    names = {
        "Llama": "llama",
        "Qwen2": "qwen2",
        "Qwen3": "qwen3",
        "Qwen3-MoE": "qwen3_moe",
        "GLM-4": "glm4",
        "GLM-4.5": "glm4_moe",
        "DeepSeek-V2": "deepseek_v2",
        "DeepSeek-V3": "deepseek_v3",
        "Mistral": "mistral",
        "Mixtral": "mixtral",
        "OLMo-2": "olmo2",
        "Gemma 3": "gemma3_text",
        "gpt-oss": "gpt_oss",
        "Phi-3": "phi3",
        "Qwen3-Next": "qwen3_next",
        "Qwen3.5": "qwen3_5_text",
    }
    listed: dict[str, set[str]] = {}
    table = PAGE.read_text(encoding="utf-8").partition("## What is refused")[0]
    for keys, families in re.findall(r"^\| (`.*?) \| (.*?) \|$", table, re.MULTILINE):
        for key in re.findall(r"`(\w+)`", keys):
            listed[key] = {names[family] for family in families.split(", ")}
    assert set(listed) == OPTIONAL_KEYS
    for key, found in listed.items():
        assert found == {family for family in FAMILIES if key in (get_model_class(family).optional_keys or ())}
