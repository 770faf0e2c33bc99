"""The run on meta tensors costs little: it imports neither torch._dynamo nor SymPy, which take seconds and 76 MB."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from xllm_models.passes import run_on_meta

BUILD_ALL = """
import json, sys
from xllm_models import TensorParallel, get_model_class

for config in json.loads(sys.argv[1]):
    for size in (1, 2):
        get_model_class(config["model_type"])(config, tp=TensorParallel(size=size))
    assert not {"torch._dynamo", "sympy"} & set(sys.modules), config["model_type"]
"""
FAMILIES = (
    *("gemma3_text", "glm4", "glm4_moe", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe"),
    *("qwen3_next", "qwen3_5_text", "gpt_oss", "deepseek_v2", "deepseek_v3"),
)


def test_building_a_model_imports_no_compiler(draw_config: Callable[[str, int], dict[str, Any]]) -> None:
    configs = [draw_config(family, 0) | {"model_type": family} for family in FAMILIES]
    subprocess.run([sys.executable, "-c", BUILD_ALL, json.dumps(configs)], check=True, timeout=120)


class ScalarOnCpu(nn.Module):
    """Computes a factor from scalars on the CPU, whose values it may read."""

    factor = 0.0

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor(6.0, device="cpu") * torch.tensor(0.5, device="cpu")
        self.factor = scale.item()
        return input_ids.unsqueeze(1) * scale


def test_scalars_on_the_cpu_keep_their_values() -> None:
    model = nn.ModuleDict({"decoder": ScalarOnCpu(), "lm_head": nn.Identity()})
    run_on_meta(model, decoder=model["decoder"], lm_head=model["lm_head"], observers=())
    assert model["decoder"].factor == 3.0


OPS_OF_PORTS = """
import sys
import torch
from torch import nn
from xllm_models.passes import run_on_meta


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, input_ids, positions):
        x = self.norm(self.linear(input_ids.new_zeros((1, 8)).float()))
        scores, ids = x.softmax(-1).topk(2)
        scores = x.sigmoid().gather(1, ids) / scores.sum(-1, keepdim=True)
        mask = torch.ones_like(x).scatter(1, ids, 0.0)
        return x.masked_fill(mask > 0, 0.0) + scores.cumsum(-1).amax(-1, keepdim=True) + x.square().mean(-1)


with torch.device("meta"):
    model = nn.ModuleDict({"decoder": Decoder(), "lm_head": nn.Linear(8, 5, bias=False)})
run_on_meta(model, decoder=model["decoder"], lm_head=model["lm_head"], observers=())
assert not {"torch._dynamo", "sympy"} & set(sys.modules)
"""


def test_ops_of_a_port_import_no_compiler() -> None:
    subprocess.run([sys.executable, "-c", OPS_OF_PORTS], check=True, timeout=120)
