"""A state dict is asked once for each of its tensors, whatever the weight map does with it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from xllm_models import TensorParallel, WeightError, get_model_class
from xllm_models.models.llama import LlamaForCausalLM

Tensors = dict[str, torch.Tensor]
FAMILIES = (
    *("llama", "mistral", "mixtral", "olmo2", "qwen2", "qwen3", "qwen3_moe", "glm4", "glm4_moe", "gemma3_text", "phi3"),
    *("qwen3_next", "qwen3_5_moe_text", "gpt_oss"),
)


class CountingStateDict:
    """Counts the calls of `get_tensor` by name."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.reads: Counter[str] = Counter()

    def has(self, name: str) -> bool:
        return name in self.tensors

    def get_tensor(self, name: str) -> torch.Tensor:
        self.reads[name] += 1
        return self.tensors[name]

    def keys(self) -> Iterable[str]:
        return iter(self.tensors)


def check_reads(model: Any, tensors: Tensors, tp: TensorParallel) -> None:
    names = sorted(tensors)
    halves = [CountingStateDict({name: tensors[name] for name in part}) for part in (names[::2], names[1::2])]
    model.load_weights(halves, tp.rank, tp.size)
    reads = halves[0].reads + halves[1].reads
    assert {name: count for name, count in reads.items() if count > 1} == {}
    assert set(reads) == set(names)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(
    family: str, size: int, draw_config: Callable[[str, int], dict[str, Any]], write_checkpoint: Callable[..., Any]
) -> None:
    _, directory = write_checkpoint(family, **draw_config(family, 0))
    config = json.loads((directory / "config.json").read_text())
    tp = TensorParallel(rank=size - 1, size=size)
    check_reads(get_model_class(family)(config, tp=tp), load_file(directory / "model.safetensors"), tp)


@pytest.fixture(scope="module")
def llama(write_checkpoint: Callable[..., tuple[Any, Path]]) -> tuple[dict[str, Any], Tensors]:
    _, directory = write_checkpoint("llama", tie_word_embeddings=False)
    return json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")


def transposed(tensors: Tensors) -> Tensors:
    return {name: tensor.T.contiguous() if "o_proj" in name else tensor for name, tensor in tensors.items()}


def interleaved(tensors: Tensors) -> Tensors:
    """Rows of the second half between those of the first."""
    return {
        name: tensor.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1).contiguous() if "up_proj" in name else tensor
        for name, tensor in tensors.items()
    }


def prefixed(tensors: Tensors) -> Tensors:
    return {f"language_model.{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "relayout"),
    [
        ({"transposed": ("*.o_proj.weight",)}, transposed),
        ({"interleaved": ("*.up_proj.weight",)}, interleaved),
        ({"prefix": "language_model."}, prefixed),
    ],
    ids=["transposed", "interleaved", "prefix"],
)
@pytest.mark.parametrize("size", [1, 2])
def test_every_layout(
    change: dict[str, Any], relayout: Callable[[Tensors], Tensors], size: int, llama: tuple[dict[str, Any], Tensors]
) -> None:
    config, tensors = llama
    weight_map = replace(LlamaForCausalLM.weight_map, **change)
    family = type("Family", (LlamaForCausalLM,), {"weight_map": weight_map})
    tp = TensorParallel(rank=0, size=size)
    check_reads(family(config, tp=tp), relayout(tensors), tp)


def test_a_quantized_checkpoint(llama: tuple[dict[str, Any], Tensors]) -> None:
    config, plain = llama
    tensors: Tensors = {}
    for name, tensor in plain.items():
        if ".self_attn." in name or ".mlp." in name:
            tensors[name] = tensor.to(torch.float8_e4m3fn)
            tensors[name + "_scale"] = torch.ones(1)
        else:
            tensors[name] = tensor
    tp = TensorParallel(rank=0, size=1)
    model = LlamaForCausalLM(config | {"quantization_config": {"quant_method": "fp8"}}, tp=tp)
    check_reads(model, tensors, tp)


def test_both_names_of_a_tied_tensor(write_checkpoint: Callable[..., tuple[Any, Path]]) -> None:
    _, directory = write_checkpoint("llama", tie_word_embeddings=True)
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tp = TensorParallel(rank=0, size=1)
    check_reads(LlamaForCausalLM(config, tp=tp), tensors, tp)


def test_a_refused_checkpoint(llama: tuple[dict[str, Any], Tensors]) -> None:
    config, tensors = llama
    state_dict = CountingStateDict({name: tensor for name, tensor in tensors.items() if "norm" not in name})
    with pytest.raises(WeightError, match="missing: "):
        LlamaForCausalLM(config).load_weights([state_dict])
    assert set(state_dict.reads.values()) == {1}
