"""load_model: what it makes, and one clear error for each bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from xllm_attention import AttentionSpec
from xllm_models import CausalLM, WeightError, get_model_class, load_model


@pytest.fixture
def directory(write_checkpoint: Callable[..., Any]) -> Path:
    path: Path = write_checkpoint("qwen3", head_dim=8)[1]
    return path


def change_config(directory: Path, **change: Any) -> None:
    path = directory / "config.json"
    raw = {key: value for key, value in (json.loads(path.read_text()) | change).items() if value is not None}
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("dtype", "want"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        ("float16", torch.float16),
        (None, torch.bfloat16),
    ],
)
def test_a_loaded_model_is_ready_to_run(directory: Path, dtype: torch.dtype | str | None, want: torch.dtype) -> None:
    change_config(directory, dtype="bfloat16")
    model = load_model(str(directory), dtype=dtype)
    assert model.dtype == want
    assert {parameter.dtype for parameter in model.parameters()} == {want}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.device == torch.device("cpu")
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5)
    assert model.layer_specs == [spec, spec]
    assert model.config.model_type == "qwen3"


def test_config_without_architectures_is_found_by_its_model_type(directory: Path) -> None:
    change_config(directory, architectures=None)
    assert type(load_model(directory)) is get_model_class("qwen3")


def test_a_model_is_made_from_model_args_names_alone(directory: Path) -> None:
    loaded = load_model(directory)
    args = loaded.config.to_model_args()
    model = get_model_class(str(args["model_type"]))(args)
    assert model.config == loaded.config
    assert model.layer_specs == loaded.layer_specs


def test_logits_of_chosen_rows(directory: Path) -> None:
    model = load_model(directory)
    hidden = torch.randn(5, model.config.hidden_size)
    logits = model.compute_logits(hidden)
    assert logits.shape == (5, model.config.vocab_size)
    for dtype in (torch.int32, torch.int64):
        rows = model.compute_logits(hidden, torch.tensor([4, 0], dtype=dtype))
        torch.testing.assert_close(rows, logits[[4, 0]])
        assert model.compute_logits(hidden, torch.empty(0, dtype=dtype)).shape == (0, model.config.vocab_size)


def test_a_step_without_tokens(directory: Path, paged: ModuleType) -> None:
    model = load_model(directory)
    (logits,) = paged.PagedSession(model, num_sequences=1).step([(0, [])])
    assert logits.shape == (0, model.config.vocab_size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "unsupported architecture 'MambaForCausalLM'; supported: .*Llama"),
        ({"architectures": None, "model_type": "mamba"}, "unsupported architecture 'mamba'"),
        ({"architectures": None, "model_type": None}, "config.json has no model_type"),
        ({"hidden_act": "relu"}, r"hidden_act 'relu' is not supported; supported: \['gelu', "),
        ({"dtype": "int4"}, "dtype 'int4' is not supported"),
        ({"n_heads": 3}, "contradictory keys"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config with quant_method 'hqq'"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope type 'spiral' is not supported"),
        ({"intermediate_size": 50}, "wrong shape: .*gate_proj"),
    ],
)
def test_bad_configs_are_refused_by_name(directory: Path, change: dict[str, Any], message: str) -> None:
    change_config(directory, **change)
    with pytest.raises(ValueError, match=message):
        load_model(directory)


def test_bad_arguments_are_refused_by_name(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match="dtype 'float8' is not supported"):
        load_model(directory, dtype="float8")
    with pytest.raises(ValueError, match="device 'abacus:0' is not available"):
        load_model(directory, device="abacus:0")
    with pytest.raises(ValueError, match="tp_rank 2 is outside the 2 ranks of tp_size"):
        load_model(directory, tp_rank=2, tp_size=2)
    with pytest.raises(ValueError, match="num_attention_heads 4 is not divisible by tp_size 3"):
        load_model(directory, tp_size=3)


def test_the_served_length_is_bounded_by_the_model_s_positions(directory: Path) -> None:
    model = load_model(directory, max_model_len=7)
    assert {tuple(buffer.shape) for buffer in model.buffers()} == {(7, 8)}
    for length in (0, 65):
        with pytest.raises(ValueError, match=f"max_model_len {length} is outside 1 to 64, the model's positions"):
            load_model(directory, max_model_len=length)


@pytest.mark.parametrize("key", ["attn_logit_softcapping", "use_bidirectional_attention"])
def test_what_gemma_does_not_serve_is_refused_by_name(key: str, write_checkpoint: Callable[..., Any]) -> None:
    _, directory = write_checkpoint("gemma3_text", head_dim=8)
    change_config(directory, **{key: 1})
    with pytest.raises(ValueError, match=f"{key} 1 is not supported"):
        load_model(directory)


def test_longrope_factors_must_fit_the_heads(write_checkpoint: Callable[..., Any]) -> None:
    _, directory = write_checkpoint("phi3", pad_token_id=None)
    factors = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    change_config(directory, rope_parameters=factors)
    with pytest.raises(ValueError, match="rope type 'longrope' needs 4 factors, got 3"):
        load_model(directory)


def test_a_device_that_is_not_there_is_named(directory: Path) -> None:
    with pytest.raises(ValueError, match="device 'cuda:77' is not available: "):
        load_model(directory, device="cuda:77")
    with pytest.raises(ValueError, match="device 'cuda:77' is not available: "):
        get_model_class("qwen3")(json.loads((directory / "config.json").read_text()), device="cuda:77")


def test_a_models_device_is_that_of_its_weights(directory: Path) -> None:
    """With an index or without, as the weights have it, whichever way the device was named."""
    model = get_model_class("qwen3")(json.loads((directory / "config.json").read_text()), device="cpu:0")
    assert {parameter.device for parameter in model.parameters()} == {model.device}


def test_weights_of_another_model_do_not_fit(directory: Path) -> None:
    change_config(directory, architectures=["LlamaForCausalLM"])
    with pytest.raises(WeightError, match=r"unexpected: model\.layers\.0\.self_attn\.k_norm\.weight, .*1.*q_norm"):
        load_model(directory)


def test_a_family_must_number_its_layers_and_fill_its_buffers() -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 5,
        "hidden_size": 4,
        "intermediate_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": 4,
    }
    llama = get_model_class("llama")

    class Gap(llama):  # type: ignore[misc, valid-type]
        def build(self, config: Any, tp: Any) -> None:
            super().build(config, tp)
            self.model.layers[0].self_attn.attn.layer_id = 1

    class Unfilled(llama):  # type: ignore[misc, valid-type]
        def build(self, config: Any, tp: Any) -> None:
            super().build(config, tp)
            self.model.register_buffer("mask", torch.zeros(3), persistent=False)

    assert issubclass(Gap, CausalLM)
    with pytest.raises(RuntimeError, match=r"must count from 0 without a gap, got \[1\]"):
        Gap(config)
    with pytest.raises(RuntimeError, match=r"buffer model\.mask has no values"):
        Unfilled(config)
