"""Each import rule of `nox -s lint` finds a planted violation: import-linter contracts and ruff's ban of torch.cuda."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
MODEL = Path("packages/xllm-models/src/xllm_models/models/llama.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the sources and the tool configuration."""
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    for source in sorted((REPO / "packages").glob("*/src")):
        target = tmp_path / source.relative_to(REPO)
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return tmp_path


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    sources = os.pathsep.join(str(path) for path in sorted((tree / "packages").glob("*/src")))
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        cwd=tree, env={**os.environ, "PYTHONPATH": sources}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def ruff(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "packages"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)


def plant(tree: Path, line: str) -> None:
    path = tree / MODEL
    text = path.read_text()
    assert "\nfrom torch import nn\n" in text
    path.write_text(text.replace("\nfrom torch import nn\n", f"\nfrom torch import nn\n{line}\n", 1))


def test_the_unchanged_tree_passes(tree: Path) -> None:
    result = lint_imports(tree)
    assert result.returncode == 0, result.stdout
    result = ruff(tree)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("line", "module"),
    [
        ("import flashinfer", "flashinfer"),
        ("import xllm_graph", "xllm_graph"),  # the sibling package
        ("from xllm_attention.backends import torch_backend", "xllm_attention.backends"),
        ("import xllm_executor", "xllm_executor"),
    ],
)
def test_a_planted_import_breaks_the_contract(tree: Path, line: str, module: str) -> None:
    plant(tree, line)
    result = lint_imports(tree)
    assert result.returncode != 0
    assert result.stdout.count(" BROKEN") == 1
    assert f"xllm_models.models.llama -> {module}" in result.stdout


@pytest.mark.parametrize(
    "line",
    [
        "import torch.cuda",
        "from torch import cuda",
        "from torch.cuda import Stream",
        "DEVICES = torch.cuda.device_count()",
    ],
)
def test_a_planted_use_of_torch_cuda_is_found(tree: Path, line: str) -> None:
    plant(tree, line)
    result = ruff(tree)
    assert result.returncode == 1
    assert "TID251 `torch.cuda" in result.stdout
    assert "llama.py" in result.stdout
