"""Loading takes no more anonymous memory than 1.2 times what the rank holds in the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from xllm_models import TensorParallel, get_model_class

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 40000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 290 MB of bf16 in two files."""
    directory = tmp_path_factory.mktemp("memory")
    model = get_model_class("llama")(CONFIG, tp=TensorParallel())
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
        module = name.split(".")[-2]
        if module not in parts:
            tensors[name] = parameter
            continue
        rows = (1024, 256, 256) if module == "qkv_proj" else (4096, 4096)
        for part, piece in zip(parts[module], parameter.split(rows), strict=True):
            tensors[name.replace(module, part)] = piece.contiguous()
    names = sorted(tensors)
    index = {}
    for number, chosen in enumerate((names[::2], names[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name].contiguous() for name in chosen}, directory / file)
        index |= dict.fromkeys(chosen, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def memory_of_load(directory: Path, rank: int, size: int, dtype: str) -> dict[str, int]:
    script = str(Path(__file__).with_name("memory_of_load.py"))
    command = [sys.executable, script, str(directory), str(rank), str(size), dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    used: dict[str, int] = json.loads(done.stdout)
    return used


@pytest.mark.parametrize(
    ("rank", "size", "dtype"), [(0, 1, "bfloat16"), (1, 2, "bfloat16"), (0, 4, "bfloat16"), (0, 2, "float32")]
)
def test_peak_memory_of_a_rank(checkpoint: Path, rank: int, size: int, dtype: str) -> None:
    used = memory_of_load(checkpoint, rank, size, dtype)
    assert used["peak"] <= 1.2 * used["shard"], used


def test_peak_memory_of_a_rank_that_dequantizes(tmp_path: Path) -> None:
    """Large fp8 weights, of which a whole one in fp32 would not fit into the margin."""
    change = {"vocab_size": 64, "intermediate_size": 32768, "num_hidden_layers": 1}
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    model = get_model_class("llama")(CONFIG | change)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    mlp = "model.layers.0.mlp."
    del shapes[f"{mlp}gate_up_proj.weight"]
    shapes |= {f"{mlp}gate_proj.weight": (32768, 1024), f"{mlp}up_proj.weight": (32768, 1024)}
    attention = "model.layers.0.self_attn."
    del shapes[f"{attention}qkv_proj.weight"]
    shapes |= {f"{attention}{x}_proj.weight": (1024 if x == "q" else 256, 1024) for x in "qkv"}
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        if "_proj" in name:
            tensors[name] = torch.randint(0, 100, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
            blocks = [-(-size // 128) for size in shape]
            tensors[name.replace("weight", "weight_scale_inv")] = torch.rand(blocks)
        else:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change | fp8))
    used = memory_of_load(tmp_path, 0, 1, "bfloat16")
    assert used["peak"] <= 1.2 * used["shard"], used
