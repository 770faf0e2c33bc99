"""What the package and its model files may import, and how long a model file may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import xllm_models

PACKAGE = Path(xllm_models.__file__).parent
MODEL_FILES = [path for path in sorted((PACKAGE / "models").glob("*.py")) if path.name != "__init__.py"]

MODEL_IMPORTS = {"__future__", "collections.abc", "typing", "torch", "xllm_attention"} | {
    f"xllm_models.{name}" for name in ("causal_lm", "config", "layers", "loading", "ops")
}

IMPORT_ALONE = """
import importlib.abc, sys

ABSENT = ("xllm_graph", "xllm_executor", "xllm_attention.backends", "flashinfer", "triton", "transformers")

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == absent or name.startswith(absent + ".") for absent in ABSENT):
            raise ModuleNotFoundError(f"{name} is not installed", name=name)

sys.meta_path.insert(0, Absent())
before = set(sys.modules)
import xllm_models
loaded = sorted(name for name in set(sys.modules) - before if name.startswith("xllm_models.models"))
assert not loaded, loaded  # families load when they are asked for
assert xllm_models.get_model_class("llama").__name__ == "LlamaForCausalLM"
import torch
assert not torch.cuda.is_initialized()
"""


def imports_of(path: Path) -> set[str]:
    """Absolute names of the modules that a file of the package imports."""
    package = ["xllm_models", *path.relative_to(PACKAGE).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            found.add(".".join((*base, *((node.module or "").split(".") if node.module else ()))))
    return found


def test_import_needs_only_the_packages_below() -> None:
    subprocess.run([sys.executable, "-c", IMPORT_ALONE], check=True, timeout=120)


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda path: path.stem)
def test_a_model_file_is_short_and_imports_layers_ops_loader_and_config_only(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 150
    assert imports_of(path) <= MODEL_IMPORTS


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_touches_a_device_runtime_or_a_backend(path: Path) -> None:
    forbidden = ("torch.cuda", "flashinfer", "xllm_graph", "xllm_executor", "xllm_attention.backends")
    assert not [name for name in imports_of(path) if name.startswith(forbidden)]
    attributes = [
        ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
    ]
    assert not [name for name in attributes if name.startswith("torch.cuda")]
