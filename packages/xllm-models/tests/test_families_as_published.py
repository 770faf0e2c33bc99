"""Families whose published checkpoints have other keys, names or tensors than transformers 5 writes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from xllm_models import WeightError, load_model

PUBLISHED_KEYS = (
    *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "num_local_experts", "num_experts_per_tok", "hidden_act"),
    *("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "bos_token_id", "eos_token_id", "use_cache"),
    *("output_router_logits", "router_aux_loss_coef"),
)


def test_mixtral_is_read_as_published(
    write_checkpoint: Callable[..., Any], hf_logits: Callable[..., list[torch.Tensor]], paged: ModuleType
) -> None:
    """With the keys of config.json that mistralai published, and their names of the weights."""
    hf, directory = write_checkpoint("mixtral", num_local_experts=4, num_hidden_layers=3)
    (weights,) = directory.glob("*.safetensors")
    with safe_open(weights, "pt") as file:
        assert "model.layers.2.block_sparse_moe.experts.3.w1.weight" in file.keys()  # noqa: SIM118
    path = directory / "config.json"
    written = json.loads(path.read_text())
    published = {key: written[key] for key in PUBLISHED_KEYS}
    path.write_text(json.dumps(published | {"rope_theta": 1e6, "torch_dtype": "float32", "sliding_window": None}))
    want = hf_logits(hf)
    for sequence, start, logits in paged.run_steps(load_model(directory)):
        expected = want[sequence][start : start + len(logits)]
        assert (logits - expected).abs().max() <= 5e-6 * expected.abs().max()


def test_glms_prediction_layer_is_left_out(
    write_checkpoint: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Its index is the number of layers. A layer with that index in a deeper model is no prediction layer."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    _, directory = write_checkpoint("glm4_moe", **experts, num_hidden_layers=3)
    want = load_model(directory).state_dict()
    path = directory / "model.safetensors"
    tensors = load_file(path)
    extra = {name.replace(".2.", ".3."): tensor.clone() for name, tensor in tensors.items() if ".layers.2." in name}
    save_file(tensors | extra | {"model.layers.3.eh_proj.weight": torch.zeros(2)}, path, metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, logger="xllm_models"):
        got = load_model(directory).state_dict()
    assert f"ignores: {len(extra) + 1} of model.layers.3.*" in caplog.text
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    save_file(tensors | {"model.layers.46.eh_proj.weight": torch.zeros(2)}, path, metadata={"format": "pt"})
    with pytest.raises(WeightError, match=r"unexpected: model\.layers\.46\.eh_proj\.weight"):
        load_model(directory)
