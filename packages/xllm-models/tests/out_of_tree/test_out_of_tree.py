"""A family outside the package: found by its entry points, equal to HF, counted; and the guide runs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from xllm_models import CausalLM, get_model_class, load_model, register_model, registry, supported_models
from xllm_models.__main__ import main

PACKAGE = Path(__file__).with_name("xllm-granite")
PORT = PACKAGE / "src" / "xllm_granite" / "granite.py"
GUIDE = Path(__file__).parents[4] / "docs" / "porting.md"
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}


@pytest.fixture(autouse=True)
def _forget_registered_models() -> Iterator[None]:
    yield
    registry._registered.clear()


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the package's dist-info, written by its own build backend."""
    copy, out = tmp_path_factory.mktemp("granite") / "package", tmp_path_factory.mktemp("metadata")
    shutil.copytree(PACKAGE, copy)
    program = "import sys, setuptools.build_meta as b; b.prepare_metadata_for_build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(out)], cwd=copy, check=True, capture_output=True)
    return out


@pytest.fixture
def installed(metadata: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(metadata)
    monkeypatch.syspath_prepend(PACKAGE / "src")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("tied", [False, True])
def test_an_installed_port_equals_hf(
    tied: bool,
    write_checkpoint: Callable[..., Any],
    hf_logits: Callable[..., list[torch.Tensor]],
    paged: ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert {"granite", "GraniteForCausalLM"} <= set(supported_models())
    config = MULTIPLIERS | {"tie_word_embeddings": tied, "attention_bias": True, "mlp_bias": True}
    hf, directory = write_checkpoint("granite", **config)
    want = hf_logits(hf)
    for sequence, start, logits in paged.run_steps(load_model(directory)):
        expected = want[sequence][start : start + len(logits)]
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert main(["compare", str(directory)]) == 0
    assert "without a counterpart" not in capsys.readouterr().out


def test_a_script_registers_a_port(write_checkpoint: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, directory = write_checkpoint("granite", **MULTIPLIERS)
    with pytest.raises(ValueError, match="unsupported architecture 'GraniteForCausalLM'"):
        load_model(directory)
    monkeypatch.syspath_prepend(PACKAGE / "src")
    from xllm_granite import GraniteForCausalLM

    register_model("GraniteForCausalLM", GraniteForCausalLM)
    assert isinstance(load_model(directory), CausalLM)
    assert get_model_class("GraniteForCausalLM") is GraniteForCausalLM
    with pytest.raises(ValueError, match="which is not a CausalLM class"):
        register_model("other", object)  # type: ignore[type-abstract]


def test_the_port_is_short_and_imports_public_names_only() -> None:
    text = PORT.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    imported = set(re.findall(r"^(?:from|import) (\S+)", text, flags=re.MULTILINE))
    assert imported <= {"__future__", "torch", "xllm_attention", "xllm_models", "xllm_models.layers"}


def test_readme_and_guide_state_the_counted_difference() -> None:
    command = [sys.executable, str(PACKAGE / "count_diff.py"), str(PORT)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(lines) == 2
    for path in (PACKAGE / "README.md", GUIDE):
        for line in lines:
            assert f"    {line}\n" in path.read_text(encoding="utf-8")


def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    checkpoint = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0]
    (command,) = re.findall(r"```bash\npython -m xllm_models (.*?)\n```", text, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(PACKAGE / "src")
    exec(checkpoint, {})
    assert main(command.split()) == 0
    # The two outputs that the guide shows, up to the last digits of an error.
    out = capsys.readouterr().out
    assert "PASS: all 41 entries within 0.0001; the worst is model.layers." in out
    assert "PASS: all 41 entries within 0.0001; the worst is model.layers." in text
    assert "note:" not in out  # the guide's checkpoint shows what it should

    *_, first_choices, verdict = with_fault("residual_multiplier", command.split(), monkeypatch, capsys)
    assert f"    {first_choices}\n" in text
    assert f"    {verdict}\n" in text
    assert "FAIL: logits departs first" in with_fault("logits_scaling", command.split(), monkeypatch, capsys)[-1]
    for bad, message in (
        ("granite", "must be MODULE:CLASS"),
        ("xllm_granite:Nothing", "has no Nothing"),
        ("nosuch:Port", "--model nosuch:Port: importing nosuch failed: No module named 'nosuch'"),
    ):
        assert main(["compare", "granite-tiny", "--model", bad]) == 2
        assert message in capsys.readouterr().err


def with_fault(
    forgotten: str, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """What the comparison says of a port that forgot one of the multipliers."""
    from xllm_granite import GraniteForCausalLM

    registry._registered.clear()
    parse = GraniteForCausalLM.parse_config
    with monkeypatch.context() as patched:
        patched.setattr(GraniteForCausalLM, "parse_config", lambda raw: parse({**raw, forgotten: 1.0}))
        assert main(command) == 1
    return capsys.readouterr().out.splitlines()
