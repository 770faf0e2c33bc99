"""Finding a model class by name: built in, registered, and from an installed package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from xllm_models import get_model_class, register_model, registry, supported_models
from xllm_models.models.llama import LlamaForCausalLM
from xllm_models.models.qwen3 import Qwen3ForCausalLM


class OtherForCausalLM(LlamaForCausalLM):
    """A family of another package."""


@pytest.fixture(autouse=True)
def _forget_registered_models() -> Iterator[None]:
    yield
    registry._registered.clear()


def test_architecture_and_model_type_name_one_class() -> None:
    assert get_model_class("LlamaForCausalLM") is get_model_class("llama") is LlamaForCausalLM
    assert get_model_class("Qwen3ForCausalLM") is get_model_class("qwen3") is Qwen3ForCausalLM


def test_an_unknown_architecture_names_the_supported_ones() -> None:
    with pytest.raises(ValueError, match=r"unsupported architecture 'Mamba'; supported: .*Llama.*Qwen3"):
        get_model_class("Mamba")


def test_register_model_adds_a_name_once() -> None:
    register_model("other", OtherForCausalLM)
    register_model("other", OtherForCausalLM)
    assert get_model_class("other") is OtherForCausalLM
    assert "other" in supported_models()
    with pytest.raises(ValueError, match="'other' is registered already"):
        register_model("other", LlamaForCausalLM)
    with pytest.raises(ValueError, match="'llama' is registered already"):
        register_model("llama", OtherForCausalLM)


def install(tmp_path: Path, name: str, entry_points: str) -> None:
    """A package's metadata as pip would leave it."""
    metadata = tmp_path / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[xllm.models]\n{entry_points}\n")


def test_entry_points_are_loaded_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugin_model.py").write_text(
        "from xllm_models.models.llama import LlamaForCausalLM\n\n\n"
        "class PluginForCausalLM(LlamaForCausalLM):\n    pass\n"
    )
    install(tmp_path, "plugin", "plugin = plugin_model:PluginForCausalLM\nnotmodel = json:dumps")
    monkeypatch.syspath_prepend(tmp_path)
    assert "plugin" in supported_models()
    assert "plugin_model" not in sys.modules
    assert get_model_class("plugin").__name__ == "PluginForCausalLM"
    with pytest.raises(ValueError, match=r"'notmodel' is .*not a CausalLM class"):
        get_model_class("notmodel")
    install(tmp_path, "second", "plugin = elsewhere:Model")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"'plugin' is claimed by \['elsewhere:Model', 'plugin_model:"):
        get_model_class("plugin")
