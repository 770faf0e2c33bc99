"""The run on meta tensors costs little: it imports neither torch._dynamo nor SymPy, which take seconds and 76 MB."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

BUILD_ALL = """
import json, sys
from xllm_models import TensorParallel, get_model_class

for config in json.loads(sys.argv[1]):
    for size in (1, 2):
        get_model_class(config["model_type"])(config, tp=TensorParallel(size=size))
    assert not {"torch._dynamo", "sympy"} & set(sys.modules), config["model_type"]
"""
FAMILIES = ("gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe")


def test_building_a_model_imports_no_compiler(draw_config: Callable[[str, int], dict[str, Any]]) -> None:
    configs = [draw_config(family, 0) | {"model_type": family} for family in FAMILIES]
    subprocess.run([sys.executable, "-c", BUILD_ALL, json.dumps(configs)], check=True, timeout=120)
