"""Ports made out of the tree pass `check`: under recorded and piecewise graphs, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from xllm_executor.__main__ import main
from xllm_models import registry

SOURCES = Path(__file__).parents[2] / "packages" / "xllm-models" / "tests" / "out_of_tree" / "xllm-ports" / "src"
SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2}
PORTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "glm4_moe": ("Glm4MoeForCausalLM", EXPERTS | {"use_qk_norm": True}),
}


@pytest.mark.parametrize("family", PORTS)
def test_a_port_passes_check(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, config = PORTS[family]
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SIZES | config)), dtype=torch.float32)
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
    hf.save_pretrained(tmp_path)
    monkeypatch.syspath_prepend(SOURCES)
    try:
        code = main(["check", str(tmp_path), "--model", f"xllm_ports.{family}:{name}", "--tp", "2"])
    finally:
        registry._registered.clear()
    lines = capsys.readouterr().out.splitlines()
    assert code == 0, lines
    assert any(line.startswith("ok    2 ranks") for line in lines)
    assert lines[-1] == "PASS"
