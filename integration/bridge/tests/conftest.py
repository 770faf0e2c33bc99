"""Fixtures of the bridge's tests: the host programs, built outside of the repository, and a small checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cmake_projects import build_project, tool
from safetensors.torch import save_file

SOURCE = Path(__file__).resolve().parents[1]
CONFIG = {
    "model_type": "llama",
    "torch_dtype": "float32",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}

Build = Callable[..., Path]


@pytest.fixture(scope="session")
def cmake_tools() -> tuple[str, str]:
    """Paths of cmake and ninja."""
    return tool("cmake"), tool("ninja")


@pytest.fixture(scope="session")
def build_host(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """`build_host(*targets, flags="", build_type="Release")`: a folder with the built programs.

    The project is copied out of the repository and knows the installed packages by find_package alone.
    """
    project = tmp_path_factory.mktemp("host")
    for source in (SOURCE / "CMakeLists.txt", *SOURCE.glob("*.cpp"), *SOURCE.glob("*.h")):
        shutil.copy(source, project)

    def build(*targets: str, flags: str = "", build_type: str = "Release") -> Path:
        folder = project / f"build-{build_type}-{abs(hash(flags))}"
        return build_project(project, folder, *targets, flags=flags, build_type=build_type)

    return build


@pytest.fixture(scope="session")
def hosts(build_host: Build) -> Path:
    """The folder of all programs, as released."""
    return build_host(
        *("bridge_host", "names_host", "contract_host", "step_benchmark"),
        *("lifecycle_host", "lifecycle_plugin", "lifecycle_loader"),
        flags="-Wall -Wextra",
    )


@pytest.fixture(scope="session")
def recorder() -> Path:
    """A folder for sys.path with an out-of-tree model and attention backend, entry points included."""
    return SOURCE / "recorder"


@pytest.fixture(scope="session")
def run_program() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_program(program, *arguments, stdin="", timeout=120, **environment)`: one run to its end."""

    def run(
        *command: object, stdin: str = "", timeout: float = 120, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        variables = {
            key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "PYTHONPATH", "XLLM_VALIDATE")
        }
        return subprocess.run(
            [str(part) for part in command], input=stdin, timeout=timeout, env={**variables, **environment},
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def make_checkpoint(folder: Path, num_layers: int, architecture: str) -> Path:
    torch.manual_seed(0)
    hidden, inner = 16, 24
    tensors = {"model.embed_tokens.weight": torch.randn(50, hidden), "model.norm.weight": torch.ones(hidden)}
    for layer in range(num_layers):
        shapes = {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden // 2, hidden),
            "self_attn.v_proj": (hidden // 2, hidden), "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape) * 0.1
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden)
    save_file(tensors, folder / "model.safetensors")
    config = {**CONFIG, "num_hidden_layers": num_layers, "architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of five layers whose architecture is the recorder's."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), 5, "RecorderForCausalLM")


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of one layer, whose steps are short."""
    return make_checkpoint(tmp_path_factory.mktemp("small"), 1, "LlamaForCausalLM")


@pytest.fixture(scope="session")
def run_scenario(
    hosts: Path, run_program: Callable[..., subprocess.CompletedProcess[str]], small_checkpoint: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_scenario(scenario, argument="", plugin=False, executable=..., **environment)`: one run to its end."""

    def run(
        scenario: str,
        argument: object = "",
        *,
        plugin: bool = False,
        executable: Path | str = sys.executable,
        model: Path = small_checkpoint,
        timeout: float = 120,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        program = (
            (hosts / "lifecycle_loader", hosts / "liblifecycle_plugin.so") if plugin else (hosts / "lifecycle_host",)
        )
        return run_program(
            *program,
            model,
            executable,
            scenario,
            argument,
            timeout=timeout,
            **{"OMP_NUM_THREADS": "1", **environment},
        )

    return run
