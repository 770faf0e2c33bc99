"""`python -m xllm_executor check`: a sound port passes, each fault of `ports` is found, bad input is named."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from xllm_executor.__main__ import main
from xllm_models import get_model_class, registry

CONFIG = {
    "architectures": ["PortForCausalLM"], "model_type": "port", "dtype": "float32", "vocab_size": 31, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    registry._registered.clear()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("port")
    torch.manual_seed(0)
    weights = {}
    for name, parameter in get_model_class("llama")(CONFIG).named_parameters():
        value = torch.randn(parameter.shape) * 0.3
        parts = {"qkv_proj": {"q_proj": 16, "k_proj": 8, "v_proj": 8}, "gate_up_proj": {"gate_proj": 24, "up_proj": 24}}
        fused = next((fused for fused in parts if fused in name), None)
        if fused is None:
            weights[name] = value
        else:
            rows = value.split(list(parts[fused].values()))
            weights |= {name.replace(fused, part): row.clone() for part, row in zip(parts[fused], rows, strict=True)}
    weights.pop("lm_head.weight", None)
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def test_a_sound_port_passes_with_an_fp8_cache(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(checkpoint), "--model", "ports:Sound", "--kv-cache-dtype", "fp8_e4m3"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "PASS"


@pytest.mark.slow
@pytest.mark.parametrize("port", ["Sound", "LayerNormed"])
def test_a_sound_port_passes(port: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(checkpoint), "--model", f"ports:{port}", "--tp", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "ok    2 ranks give the logits of one" in lines
    assert lines[-1] == "PASS"
    for backend in ("recorded", "piecewise", "2 ranks, recorded", "2 ranks, piecewise"):
        for what in ("every_live_size", "mixed_workload"):
            assert f"ok    {backend}: {what}" in lines
    assert all(line.startswith("ok    ") for line in lines[:-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("port", "more", "finding"),
    [
        ("ReadsPositions", [], r"FAIL  recorded: captures: "),
        ("CountsCalls", [], "FAIL  recorded: every_live_size: "),
        (
            "ScalesByRanks",
            ["--tp", "2"],
            r"FAIL  2 ranks give the logits of one: relative error 1\.00e\+00 of rank \d's logits is beyond 0\.0001: "
            r"the model class's own forward is the first module that differs from one rank, with relative error 1",
        ),
        (
            "RaisesForThreeTokens",
            [],
            r"FAIL  recorded: every_live_size: step \d+ \(\w+( prefill)?: \d sequences, 3 tokens\) raised eagerly: "
            r"IndexError: .* \(ports\.py:\d+ in forward: hidden = hidden\[:, hidden\.shape\[1\]\]\)",
        ),
        (
            "RaisesWhenBuilt",
            [],
            r"FAIL  the model is built and loaded: AttributeError: .*missing_attribute.* \(ports\.py:\d+ in build: ",
        ),
        (
            "RaisesOnRank1",
            ["--tp", "2"],
            r"FAIL  2 ranks, a prompt runs eagerly: rank 1: RuntimeError: .* \(llama\.py:\d+ in forward: q, k = ",
        ),
        ("CountsCallsOnRank1", ["--tp", "2"], r"FAIL  2 ranks, recorded: every_live_size: rank (0, )?1: "),
    ],
)
def test_a_fault_is_found(
    port: str, more: list[str], finding: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(checkpoint), "--model", f"ports:{port}", *more]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(re.match(finding, line) for line in lines), lines
    assert lines[-1].startswith("FAIL: ")


def test_bad_input_is_named(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        ([str(checkpoint)], "unsupported architecture 'PortForCausalLM'"),
        ([str(checkpoint), "--model", "ports:Nothing"], "module ports has no Nothing"),
        ([str(checkpoint), "--model", "ports:Sound", "--tp", "0"], "--tp is 0; it must be at least 1"),
        (
            [str(checkpoint), "--model", "ports:SumsTwice"],
            "model.layers.0.post_attention_layernorm sums its input over the ranks (tp=...), but that is no "
            "partial sum: it comes from model.layers.0.self_attn.o_proj",
        ),
        (
            [str(checkpoint), "--model", "ports:Sound", "--tp", "3"],
            "--tp 3: num_attention_heads 4 is not divisible by tp_size 3",
        ),
        ([str(checkpoint), "--model", "ports:Sound", "--tp", "2", "--device", "cpu:0"], "names one device"),
        ([str(checkpoint), "--model", "ports:Sound", "--attention", "nothing"], "'nothing'"),
        ([str(checkpoint), "--model", "ports:Sound", "--dtype", "int8"], "dtype 'int8' is not supported"),
        ([str(checkpoint), "--model", "ports:Sound", "--device", "abacus"], "abacus"),
        ([str(checkpoint), "--model", "ports:Sound", "--device", "meta"], "--device meta has no values to compare"),
        (["nowhere"], "model directory nowhere does not exist"),
    ):
        registry._registered.clear()
        assert main(["check", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
