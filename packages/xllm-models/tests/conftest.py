"""Shared pieces of the tests: checkpoints written by HF transformers, and the paged session that runs our models."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="50 random configurations a model family instead of 10")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` run only where they are asked for, and then a missing device is an error."""
    asked_for = os.environ.get("XLLM_GPU_TESTS") == "1"
    if asked_for and not torch.cuda.is_available():
        raise pytest.UsageError("XLLM_GPU_TESTS=1, but there is no CUDA device")
    if not asked_for:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def sibling(name: str) -> ModuleType:
    """The module `name` of this folder. Tests are imported by path, so it belongs to no package."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`family` and `number` together: the random configurations of every family."""
    if "number" in metafunc.fixturenames:
        numbers = range(50 if metafunc.config.getoption("thorough") else 10)
        pairs = [(family, number) for family in sibling("random_configs").FAMILIES for number in numbers]
        metafunc.parametrize(("family", "number"), pairs)


@pytest.fixture(scope="session")
def paged() -> ModuleType:
    """The module `paged_session`."""
    return sibling("paged_session")


@pytest.fixture(scope="session")
def draw_config() -> Callable[[str, int], dict[str, Any]]:
    """(family, number) -> the arguments of a random configuration."""
    draw: Callable[[str, int], dict[str, Any]] = sibling("random_configs").draw
    return draw


@pytest.fixture(scope="session")
def rank_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The `RankPool`: four ranks over gloo, started once."""
    with sibling("rank_pool").RankPool(tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


@pytest.fixture(scope="session")
def write_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[PreTrainedModel, Path]]:
    """(model_type, seed, **config) -> a random HF model in fp32, and the directory it was saved to."""

    def write(model_type: str, *, seed: int = 0, **config: Any) -> tuple[PreTrainedModel, Path]:
        torch.manual_seed(seed)
        small = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        hf_config = AutoConfig.for_model(model_type, **(small | heads | config))
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, attn_implementation="eager").eval()
        # Biases and norms begin at 0 and 1, where a mistake with them would not show.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
            for name, buffer in model.named_buffers():
                if name.endswith("correction_bias"):
                    buffer.copy_(torch.linspace(-0.3, 0.3, buffer.numel()).reshape(buffer.shape))
        directory = tmp_path_factory.mktemp(f"{model_type}-{seed}-")
        model.save_pretrained(directory)
        return model, directory

    return write


@pytest.fixture(scope="session")
def hf_logits(paged: ModuleType) -> Callable[[PreTrainedModel], list[torch.Tensor]]:
    """HF's logits [n, vocab] of each whole text of the paged session."""

    def compute(hf: PreTrainedModel) -> list[torch.Tensor]:
        with torch.no_grad():
            return [hf(torch.tensor([text])).logits[0] for text in paged.texts(hf.config.vocab_size)]

    return compute
