"""The ports of xllm-ports: equal to HF, found by their entry points, on one rank and on several."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open

from xllm_models import load_model, registry, supported_models
from xllm_models.__main__ import main

PACKAGE = Path(__file__).with_name("xllm-ports")
EXPERTS = {"num_experts_per_tok": 2, "num_hidden_layers": 3}
GROUPS = {"n_group": 4, "topk_group": 2, "n_routed_experts": 8}
# Each family's own numbers have values that have an effect.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", EXPERTS | {"num_local_experts": 4}),
    "mixtral with windows": ("mixtral", EXPERTS | {"num_local_experts": 6, "sliding_window": 5, "head_dim": 12}),
    "olmo2": ("olmo2", {}),
    "olmo2 with one kv head": ("olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    "glm4_moe": (
        "glm4_moe",
        EXPERTS | GROUPS | {"moe_intermediate_size": 24, "routed_scaling_factor": 1.7, "use_qk_norm": True},
    ),
    "glm4_moe with biases": (
        "glm4_moe",
        EXPERTS
        | {"moe_intermediate_size": 16, "n_routed_experts": 4, "norm_topk_prob": False, "attention_bias": True}
        | {"n_shared_experts": 2, "first_k_dense_replace": 2, "tie_word_embeddings": True, "head_dim": 16},
    ),
}
PUBLISHED_KEYS = (
    *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "num_local_experts", "num_experts_per_tok", "hidden_act"),
    *("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "bos_token_id", "eos_token_id", "use_cache"),
    *("output_router_logits", "router_aux_loss_coef"),
)


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the package's dist-info, written by its own build backend."""
    copy, out = tmp_path_factory.mktemp("ports") / "package", tmp_path_factory.mktemp("metadata")
    shutil.copytree(PACKAGE, copy)
    program = "import sys, setuptools.build_meta as b; b.prepare_metadata_for_build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(out)], cwd=copy, check=True, capture_output=True)
    return out


@pytest.fixture(autouse=True)
def _installed(metadata: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(metadata)
    monkeypatch.syspath_prepend(PACKAGE / "src")
    yield
    registry._registered.clear()


@pytest.fixture(params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, write_checkpoint: Callable[..., Any]) -> tuple[Any, Path]:
    family, config = CONFIGS[request.param]
    written: tuple[Any, Path] = write_checkpoint(family, **config)
    return written


def test_a_port_equals_hf(
    checkpoint: tuple[Any, Path], hf_logits: Callable[..., list[torch.Tensor]], paged: ModuleType
) -> None:
    hf, directory = checkpoint
    assert hf.config.architectures[0] in supported_models()
    want = hf_logits(hf)
    for sequence, start, logits in paged.run_steps(load_model(directory)):
        expected = want[sequence][start : start + len(logits)]
        assert (logits - expected).abs().max() <= 5e-6 * expected.abs().max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_port_passes_compare(checkpoint: tuple[Any, Path], dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, directory = checkpoint
    assert main(["compare", str(directory), "--dtype", dtype]) == 0, capsys.readouterr().out


def test_mixtral_is_read_as_published(
    write_checkpoint: Callable[..., Any], hf_logits: Callable[..., list[torch.Tensor]], paged: ModuleType
) -> None:
    """With the keys of config.json that mistralai published, and their names of the weights."""
    hf, directory = write_checkpoint("mixtral", **CONFIGS["mixtral"][1])
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
