"""The ports of xllm-ports: equal to HF, found by their entry points, on one rank and on several."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from xllm_models import load_model, registry, supported_models
from xllm_models.__main__ import main

PACKAGE = Path(__file__).with_name("xllm-ports")
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
SLIDING, FULL = "sliding_attention", "full_attention"
EXPERTS = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 16, "num_hidden_layers": 4}
# Each family's own numbers have values that have an effect.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo3": ("olmo3", {"sliding_window": 5, "num_hidden_layers": 4}),
    "olmo3 with one kv head": (
        "olmo3",
        {"num_key_value_heads": 1, "attention_bias": True, "sliding_window": 3}
        | {"layer_types": [FULL, SLIDING], "tie_word_embeddings": True}
        | {"rope_parameters": {FULL: LINEAR, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}},
    ),
    "ernie4_5_moe": ("ernie4_5_moe", EXPERTS | {"moe_norm_min": 0.6, "tie_word_embeddings": False}),
    "ernie4_5_moe with dense layers": (
        "ernie4_5_moe",
        EXPERTS
        | {"moe_num_shared_experts": 1, "head_dim": 12, "moe_layer_interval": 2}
        | {"moe_layer_start_index": 0, "moe_layer_end_index": 2},
    ),
    "ernie4_5_moe without shared experts": ("ernie4_5_moe", EXPERTS | {"moe_num_shared_experts": 0}),
}


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


def test_a_port_refuses_what_it_does_not_do(write_checkpoint: Callable[..., Any]) -> None:
    _, directory = write_checkpoint("ernie4_5_moe", **EXPERTS, use_bias=True)
    with pytest.raises(ValueError, match="use_bias true is not supported"):
        load_model(directory)
