"""Scales of an fp8 KV cache: read under every exporter's names, strictly, and used by the model's steps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from xllm_attention import AttentionSpec
from xllm_models.loading import DictStateDict, WeightError
from xllm_models.loading.model import load_model

LAYERS = 2
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def checkpoint(write_checkpoint: Callable[..., Any]) -> Path:
    _, directory = write_checkpoint("llama", num_hidden_layers=LAYERS)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    return Path(directory)


def add(directory: Path, tensors: Tensors) -> None:
    file = directory / "model.safetensors"
    save_file(load_file(file) | tensors, file)


def scales_of(model: Any) -> list[tuple[float, float]]:
    found = []
    for spec in model.layer_specs:
        assert isinstance(spec, AttentionSpec)
        assert spec.cache_scales is not None
        found.append((spec.cache_scales.k, spec.cache_scales.v))
    return found


def per_layer(k_name: str, v_name: str, shape: tuple[int, ...] = ()) -> Tensors:
    """k_scale 0.5 and v_scale 0.25 in layer 0, half of them in layer 1."""
    return {
        f"model.layers.{layer}.self_attn.{name}": torch.full(shape, value / 2**layer)
        for layer in range(LAYERS)
        for name, value in ((k_name, 0.5), (v_name, 0.25))
    }


NAMES = [
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("k_proj.kv_cache_scale", "v_proj.kv_cache_scale"),
    ("k_cache.scale", "v_cache.scale"),
    ("k_cache_scale", "v_cache_scale"),
]


@pytest.mark.parametrize("shape", [(), (1,), (2, 1, 1)])
@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
def test_every_exporters_names(names: tuple[str, str], shape: tuple[int, ...], checkpoint: Path) -> None:
    add(checkpoint, per_layer(*names, shape))
    assert scales_of(load_model(checkpoint, kv_cache_dtype="fp8_e4m3")) == [(0.5, 0.25), (0.25, 0.125)]


def test_one_scale_for_keys_and_values_and_largest_values(checkpoint: Path) -> None:
    add(
        checkpoint,
        {
            "model.layers.0.self_attn.kv_scale": torch.tensor(0.5),
            "model.layers.1.self_attn.k_bmm_quantizer._amax": torch.tensor(448.0),
            "model.layers.1.self_attn.v_bmm_quantizer._amax": torch.tensor(224.0),
        },
    )
    assert scales_of(load_model(checkpoint, kv_cache_dtype="fp8")) == [(0.5, 0.5), (1.0, 0.5)]


def test_a_checkpoint_without_scales_has_scales_of_1(checkpoint: Path) -> None:
    model = load_model(checkpoint, kv_cache_dtype="fp8_e4m3")
    assert scales_of(model) == [(1.0, 1.0)] * LAYERS
    assert {one.dtype for layer in model.cache_specs for one in layer} == {torch.float8_e4m3fn}
    assert model.layer_specs[0] == model.layer_specs[1]  # one attention group


def test_auto_is_a_cache_of_the_models_dtype(checkpoint: Path) -> None:
    add(checkpoint, per_layer("k_scale", "v_scale"))
    model = load_model(checkpoint, dtype="bfloat16")
    assert {one.dtype for layer in model.cache_specs for one in layer} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["fp8_e5m2", "int8", "bfloat16", ""])
def test_other_dtypes_are_refused(name: str, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=rf"kv_cache_dtype '{name}' is not supported; supported: \['auto', 'fp8', "):
        load_model(checkpoint, kv_cache_dtype=name)


LAYER = "model.layers.1.self_attn."
REFUSED: list[tuple[Tensors, str]] = [
    ({f"{LAYER}v_scale": torch.tensor(0.0)}, "v_scale is 0.0; it must be positive and finite"),
    ({f"{LAYER}k_scale": torch.tensor(-1.0)}, "k_scale is -1.0; it must be positive and finite"),
    ({f"{LAYER}k_scale": torch.tensor(torch.nan)}, "has 1 unequal scales"),
    ({f"{LAYER}k_scale": torch.tensor([0.5, 0.25])}, f"{LAYER}k_scale has 2 unequal scales; served is one per layer"),
    ({f"{LAYER}attn.k_scale": torch.tensor(0.5)}, "is a second k_scale of the KV cache of layer 1"),
    ({f"{LAYER}kv_scale": torch.tensor(0.5)}, "is a second k_scale of the KV cache of layer 1"),
    ({f"{LAYER}k_zero_point": torch.tensor(3.0)}, f"{LAYER}k_zero_point is not read: an fp8 KV cache has"),
    ({f"{LAYER}k_bmm_quantizer._scale": torch.tensor(3.0)}, "k_bmm_quantizer._scale is not read"),
]


@pytest.mark.parametrize(("tensors", "message"), REFUSED)
def test_scales_that_cannot_be_used_are_refused(tensors: Tensors, message: str, checkpoint: Path) -> None:
    add(checkpoint, per_layer("k_scale", "v_scale") | tensors)
    with pytest.raises(WeightError, match=re.escape(message)):
        load_model(checkpoint, kv_cache_dtype="fp8_e4m3")


def test_scales_of_some_layers_only_are_refused(checkpoint: Path) -> None:
    scales = per_layer("k_scale", "v_scale")
    del scales["model.layers.1.self_attn.v_scale"]
    add(checkpoint, scales)
    with pytest.raises(WeightError, match=r"but not v_scale of model\.layers\.1$"):
        load_model(checkpoint, kv_cache_dtype="fp8_e4m3")


def test_an_offset_of_0_and_scales_of_queries_have_no_effect(checkpoint: Path) -> None:
    others = {"k_zero_point": torch.tensor(0.0), "q_scale": torch.tensor(0.5)}
    add(checkpoint, per_layer("k_scale", "v_scale") | {LAYER + name: value for name, value in others.items()})
    assert scales_of(load_model(checkpoint, kv_cache_dtype="fp8_e4m3"))[1] == (0.25, 0.125)


def test_a_failed_load_sets_no_scale_and_a_second_load_keeps_them(checkpoint: Path) -> None:
    model = load_model(checkpoint, kv_cache_dtype="fp8_e4m3")
    tensors = load_file(checkpoint / "model.safetensors")
    model.load_weights([DictStateDict(tensors)])
    with pytest.raises(WeightError, match=r"KV cache of model\.layers\.0: k_scale and v_scale are \(0\.5, 0\.25\); an"):
        model.load_weights([DictStateDict(tensors | per_layer("k_scale", "v_scale"))])
    assert scales_of(model) == [(1.0, 1.0)] * LAYERS
    assert model.weights_loaded


def test_decode_reads_the_cache_with_the_scales(checkpoint: Path, paged: Any) -> None:
    """Logits are near those with a cache of the model's dtype, and not equal to them."""

    def logits(**options: Any) -> torch.Tensor:
        session = paged.PagedSession(load_model(checkpoint, dtype="float32", **options), num_sequences=1)
        session.step([(0, [3, 1, 4, 1, 5, 9, 2, 6])])
        return torch.cat([session.step([(0, [token])])[0] for token in (7, 8)])

    exact = logits()
    add(checkpoint, per_layer("k_scale", "v_scale"))
    near = logits(kv_cache_dtype="fp8_e4m3")
    assert 1e-4 < float((near - exact).norm() / exact.norm()) < 0.1
