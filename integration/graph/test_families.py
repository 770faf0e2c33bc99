"""Families that `check` runs from their checkpoints: recorded and piecewise graphs, on one rank and on two.

Families of the package, and ports made out of its tree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

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
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "olmo2": {},
    "glm4": {"head_dim": 16, "pad_token_id": None},
    "deepseek_v2": EXPERTS | LATENT | {"q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": EXPERTS | LATENT | {"first_k_dense_replace": 1},
    "glm4_moe": EXPERTS | {"use_qk_norm": True},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "olmo3": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "ernie4_5_moe": ERNIE,
    "gemma3": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5, "sliding_window_pattern": 2},
}
VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
PORTS = {"olmo3": "Olmo3ForCausalLM", "ernie4_5_moe": "Ernie4_5_MoeForCausalLM"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_passes_check(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    text = SIZES | FAMILIES[family]
    hf: Any
    if family == "gemma3":  # a checkpoint of a text and a vision model
        vision = {"vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": 66}
        config = AutoConfig.for_model(family, text_config=text, **vision)
        hf = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    else:
        hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **text), dtype=torch.float32)
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
    hf.save_pretrained(tmp_path)
    monkeypatch.syspath_prepend(SOURCES)
    port = ["--model", f"xllm_ports.{family}:{PORTS[family]}"] if family in PORTS else []
    try:
        code = main(["check", str(tmp_path), *port, "--tp", "2"])
    finally:
        registry._registered.clear()
    lines = capsys.readouterr().out.splitlines()
    assert code == 0, lines
    assert any(line.startswith("ok    2 ranks") for line in lines)
    assert lines[-1] == "PASS"
