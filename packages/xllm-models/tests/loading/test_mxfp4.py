"""MXFP4 checkpoints of gpt-oss against transformers' own conversion of their packed tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from xllm_models import DictStateDict, WeightError, load_model
from xllm_models.config import Quantization, parse_quantization
from xllm_models.loading import dequantized

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
MXFP4 = Quantization(method="mxfp4", format="mxfp4")


def packed(num_experts: int, num_outputs: int, num_inputs: int, *, low: int = 120, high: int = 126) -> Any:
    """Random blocks and scales, with exponents from `low` to below `high`."""
    generator = torch.Generator().manual_seed(num_outputs + num_inputs)
    blocks = (num_experts, num_outputs, num_inputs // 32, 16)
    return (
        torch.randint(0, 256, blocks, generator=generator, dtype=torch.uint8),
        torch.randint(low, high, blocks[:-1], generator=generator, dtype=torch.uint8),
    )


def test_any_region_is_what_transformers_converts() -> None:
    blocks, scales = packed(3, 10, 96, low=0, high=250)
    want = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    files = [DictStateDict({"w_blocks": blocks, "other": torch.ones(1)}), DictStateDict({"w_scales": scales})]
    assert parse_quantization({"quantization_config": CONFIG}) == MXFP4
    view, rest = dequantized(files, MXFP4)
    assert list(view.keys()) == ["other", "w"]
    assert list(rest.keys()) == []
    assert torch.equal(view.get_tensor("w"), want)
    region: Any = view
    for inputs, outputs in ((slice(0, 96), slice(2, 5)), (slice(40, 41), slice(0, 10)), (slice(24, 72), slice(9, 10))):
        assert torch.equal(region.get_slice("w")[1:3, inputs, outputs], want[1:3, inputs, outputs])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_runs_as_its_dequantized_twin(
    dtype: torch.dtype, write_checkpoint: Callable[..., Any], paged: ModuleType, tmp_path: Path
) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
    _, plain = write_checkpoint("gpt_oss", head_dim=8, num_key_value_heads=4, sliding_window=5, **experts)
    weights = load_file(plain / "model.safetensors")
    quantized, twin = dict(weights), dict(weights)
    for name, weight in weights.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            num_experts, num_inputs, num_outputs = weight.shape
            blocks, scales = packed(num_experts, num_outputs, num_inputs)
            del quantized[name]
            quantized |= {name + "_blocks": blocks, name + "_scales": scales}
            twin[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    raw = json.loads((plain / "config.json").read_text())
    for directory, tensors, extra in (("q", quantized, {"quantization_config": CONFIG}), ("t", twin, {})):
        (tmp_path / directory).mkdir()
        save_file(tensors, tmp_path / directory / "model.safetensors")
        (tmp_path / directory / "config.json").write_text(json.dumps(raw | extra))
    q, t = (load_model(tmp_path / name, dtype=dtype) for name in ("q", "t"))
    steps = zip(paged.run_steps(q), paged.run_steps(t), strict=True)
    assert all(torch.equal(ours, want) for (_, _, ours), (_, _, want) in steps)
    # A rank of four has 16 inputs of the down projection, half of what shares a scale.
    for rank in range(4):
        q, t = (load_model(tmp_path / name, dtype=dtype, tp_rank=rank, tp_size=4).state_dict() for name in ("q", "t"))
        assert all(torch.equal(q[name], t[name]) for name in t)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"w_scales": torch.zeros(2, 4, 3, dtype=torch.uint8)},
            WeightError,
            r"w_scales \(checkpoint \[2, 4, 3\], expec",
        ),
        ({"w_blocks": torch.zeros(2, 4, 2, 8, dtype=torch.uint8)}, WeightError, r"expected \[2, 4, 2, 16\]"),
        ({"w_blocks": torch.zeros(4, 2, 16, dtype=torch.uint8)}, WeightError, "expected four dimensions"),
        ({"w_scales": None}, ValueError, "quantized weight w_blocks lacks w_scales"),
    ],
)
def test_parts_that_do_not_fit_are_named(change: dict[str, Any], error: type[ValueError], message: str) -> None:
    blocks, scales = packed(2, 4, 64)
    tensors = {"w_blocks": blocks, "w_scales": scales} | change
    with pytest.raises(error, match=message):
        dequantized([DictStateDict({name: x for name, x in tensors.items() if x is not None})], MXFP4)
