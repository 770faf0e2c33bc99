from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from xllm_attention import AttentionSpec, BackendLimits, available_backends, create_backend, unavailable_backends

LIMITS = BackendLimits(
    device=torch.device("cpu"), dtype=torch.float32, max_num_seqs=4, max_num_tokens=16, max_model_len=12
)

BACKEND_SOURCE = '''
from xllm_attention.backends.torch_backend import TorchBackend


class Outside(TorchBackend):
    """A backend of another distribution."""

    name = "outside"


not_a_backend = 3
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution on the path whose entry points are written by the test: returns their file."""
    (tmp_path / "outside_attention.py").write_text(BACKEND_SOURCE)
    info = tmp_path / "outside_attention-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-attention\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    return info / "entry_points.txt"


def _declare(file: Path, *lines: str) -> None:
    file.write_text("\n".join(["[xllm.attention_backends]", *lines, ""]))


def test_built_in() -> None:
    assert {"torch", "triton"} <= set(available_backends())
    declared = {*available_backends(), *unavailable_backends()}
    assert declared == {"torch", "triton", "flashinfer"}
    for name, reason in unavailable_backends().items():
        assert reason.startswith(f"xllm_attention.backends.{name}_backend:"), name
        assert "No module named" in reason


def test_unknown_name(spec: AttentionSpec) -> None:
    with pytest.raises(ValueError, match=r"no attention backend 'nonesuch'; available are \['torch', 'triton'\]"):
        create_backend("nonesuch", [spec], LIMITS)


def test_out_of_tree_backend(install: Path, spec: AttentionSpec) -> None:
    _declare(install, "outside = outside_attention:Outside")
    assert available_backends() == ("outside", "torch", "triton")
    backend = create_backend("outside", [spec], LIMITS)
    assert backend.name == "outside"


def test_unavailable_backends_say_why(install: Path, spec: AttentionSpec) -> None:
    _declare(
        install,
        "missing = no_such_module_anywhere:Backend",
        "renamed = outside_attention:Gone",
        "odd = outside_attention:not_a_backend",
    )
    reasons = unavailable_backends()
    assert set(reasons) - {"flashinfer"} == {"missing", "renamed", "odd"}
    with pytest.raises(ValueError, match="no attention backend 'missing'; available are") as error:
        create_backend("missing", [spec], LIMITS)
    for name, reason in reasons.items():
        assert f"{name!r} is not: {reason}" in str(error.value)
    assert "No module named 'no_such_module_anywhere'" in reasons["missing"]
    assert "'Gone'" in reasons["renamed"]
    assert reasons["odd"] == "outside_attention:not_a_backend is not a subclass of AttentionBackend"


@pytest.mark.parametrize("error", [RuntimeError, OSError, ImportError, AttributeError])
def test_a_library_that_refuses_to_load_says_why(
    install: Path, tmp_path: Path, spec: AttentionSpec, error: type[Exception]
) -> None:
    """As with parts of other versions, or a shared library that is not there: the others are served."""
    module = f"refusing_{error.__name__.lower()}"
    (tmp_path / f"{module}.py").write_text(f"raise {error.__name__}('cubin version 1 does not match 2')\n")
    _declare(install, f"refusing = {module}:Backend")
    reason = f"{module}:Backend cannot be loaded: cubin version 1 does not match 2"
    assert unavailable_backends()["refusing"] == reason
    assert create_backend("torch", [spec], LIMITS).name == "torch"
    with pytest.raises(ValueError, match=f"'refusing' is not: {reason}"):
        create_backend("refusing", [spec], LIMITS)


def test_a_name_declared_twice(install: Path, spec: AttentionSpec) -> None:
    _declare(install, "torch = outside_attention:Outside")
    with pytest.raises(ValueError, match=r"'torch' is declared twice.*outside_attention:Outside"):
        create_backend("torch", [spec], LIMITS)


def test_importing_loads_no_backend() -> None:
    code = (
        "import sys, xllm_attention, torch\n"
        "assert not [m for m in sys.modules if m.startswith('xllm_attention.backends')]\n"
        "assert not {'flashinfer', 'hypothesis', 'triton'} & set(sys.modules)\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
