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


@pytest.mark.parametrize(
    ("rank", "size", "dtype"), [(0, 1, "bfloat16"), (1, 2, "bfloat16"), (0, 4, "bfloat16"), (0, 2, "float32")]
)
def test_peak_memory_of_a_rank(checkpoint: Path, rank: int, size: int, dtype: str) -> None:
    script = str(Path(__file__).with_name("memory_of_load.py"))
    command = [sys.executable, script, str(checkpoint), str(rank), str(size), dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    used = json.loads(done.stdout)
    assert used["peak"] <= 1.2 * used["shard"], used
