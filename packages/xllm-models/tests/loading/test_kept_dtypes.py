"""Parameters and buffers with a dtype of their own: bf16 models load them exactly, whole and sharded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from xllm_models import DictStateDict, TensorParallel, WeightError, load_model
from xllm_models.layers import KeepDtypeParameter, ShardedModule, WeightShard, row_shards
from xllm_models.models.llama import LlamaForCausalLM

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
NUM_HEADS, NUM_EXPERTS = 8, 6


class Extra(ShardedModule):
    """What DeepSeek's routers and Mamba's mixers hold in fp32; `A_log`, `dt_bias` and `decay` are sharded."""

    e_score_correction_bias: torch.Tensor  # [E] fp32, a buffer as in HF
    tid2eid: torch.Tensor  # [E] int64, a buffer

    decay: torch.Tensor  # [H] fp32, a buffer

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.heads = tp.shard("num_heads", NUM_HEADS)
        self.A_log = KeepDtypeParameter(torch.empty(self.heads.size, dtype=torch.float32))
        self.dt_bias = KeepDtypeParameter(torch.empty(self.heads.size, dtype=torch.float32))
        self.weight = nn.Parameter(torch.empty(self.heads.size))
        self.register_buffer("decay", torch.empty(self.heads.size, dtype=torch.float32))
        self.register_buffer("e_score_correction_bias", torch.empty(NUM_EXPERTS, dtype=torch.float32))
        self.register_buffer("tid2eid", torch.empty(NUM_EXPERTS, dtype=torch.int64))

    def weight_shards(self, name: str) -> tuple[WeightShard, ...]:
        if name in ("A_log", "dt_bias", "decay", "weight"):
            return row_shards((self.heads,))
        return super().weight_shards(name)


class Model(LlamaForCausalLM):
    def build(self, config: Any, tp: TensorParallel) -> None:
        super().build(config, tp)
        self.model.extra = Extra(tp)


def extra_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    floats = {
        "A_log": NUM_HEADS,
        "dt_bias": NUM_HEADS,
        "decay": NUM_HEADS,
        "weight": NUM_HEADS,
        "e_score_correction_bias": NUM_EXPERTS,
    }
    tensors = {f"model.extra.{name}": torch.rand(size, generator=generator) for name, size in floats.items()}
    return tensors | {"model.extra.tid2eid": torch.arange(NUM_EXPERTS).flip(0)}


@pytest.fixture
def checkpoint(write_checkpoint: Callable[..., Any]) -> dict[str, torch.Tensor]:
    config = {key: value for key, value in CONFIG.items() if key != "model_type"}
    _, directory = write_checkpoint("llama", **config, num_key_value_heads=4)
    return load_file(directory / "model.safetensors") | extra_tensors()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_values_in_fp32_are_exact_in_every_model_dtype(
    dtype: torch.dtype, size: int, checkpoint: dict[str, torch.Tensor]
) -> None:
    ranks = [Model(CONFIG, dtype=dtype, tp=TensorParallel(rank=rank, size=size)) for rank in range(size)]
    for rank, model in enumerate(ranks):
        before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
        for _ in range(2):
            model.load_weights([DictStateDict(checkpoint)], rank, size)
        assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    for name in ("A_log", "dt_bias", "decay"):
        held = [model.state_dict()[f"model.extra.{name}"] for model in ranks]
        assert {parameter.dtype for parameter in held} == {torch.float32}
        assert torch.equal(torch.cat(list(held)), checkpoint[f"model.extra.{name}"])
    for model in ranks:
        bias = model.get_buffer("model.extra.e_score_correction_bias")
        assert bias.dtype == torch.float32
        assert torch.equal(bias, checkpoint["model.extra.e_score_correction_bias"])
        assert torch.equal(model.get_buffer("model.extra.tid2eid"), checkpoint["model.extra.tid2eid"])
        assert model.get_parameter("model.extra.weight").dtype == dtype


def test_a_checkpoint_in_bf16_fills_them_too(checkpoint: dict[str, torch.Tensor]) -> None:
    rounded = {name: x.bfloat16() if x.is_floating_point() else x for name, x in checkpoint.items()}
    model = Model(CONFIG, dtype=torch.bfloat16)
    model.load_weights([DictStateDict(rounded)])
    want = rounded["model.extra.A_log"].float()
    assert torch.equal(model.get_parameter("model.extra.A_log"), want)


def test_a_buffer_of_the_state_dict_must_be_in_the_checkpoint(checkpoint: dict[str, torch.Tensor]) -> None:
    model = Model(CONFIG)
    del checkpoint["model.extra.e_score_correction_bias"]
    with pytest.raises(WeightError, match=r"missing: model\.extra\.e_score_correction_bias"):
        model.load_weights([DictStateDict(checkpoint)])


def test_integers_fill_integers_only(checkpoint: dict[str, torch.Tensor]) -> None:
    model = Model(CONFIG)
    for name, wrong in (("tid2eid", torch.ones(NUM_EXPERTS)), ("A_log", torch.ones(NUM_HEADS, dtype=torch.int64))):
        with pytest.raises(WeightError, match=rf"wrong dtype: model\.extra\.{name} \(torch\."):
            model.load_weights([DictStateDict(checkpoint | {f"model.extra.{name}": wrong})])


def test_a_directory_loads_the_same(
    checkpoint: dict[str, torch.Tensor], tmp_path: Path, paged: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xllm_models.registry.get_model_class", lambda name: Model)
    save_file(checkpoint, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"dtype": "bfloat16"}))
    model = load_model(tmp_path)
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.get_parameter("model.extra.dt_bias"), checkpoint["model.extra.dt_bias"])
    assert all(torch.isfinite(logits).all() for _, _, logits in paged.run_steps(model))
