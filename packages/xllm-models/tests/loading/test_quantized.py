"""Quantized checkpoints against the weights they were made from, by packers written here from the formats' layout."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from xllm_models import DictStateDict, WeightError, load_model
from xllm_models.config import Quantization, parse_quantization
from xllm_models.loading import dequantized

Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, torch.Tensor]  # the quantized tensors of a `weight`, and the dequantized weight

FP8_BLOCK = {"quant_method": "fp8", "weight_block_size": [16, 8]}
FP8_TENSOR = {"quant_method": "fp8"}
FP8_CHANNEL = {"quant_method": "fbgemm_fp8"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
GPTQ_V2 = GPTQ | {"checkpoint_format": "gptq_v2", "group_size": -1}
GPTQ_ACT = GPTQ | {"desc_act": True}
COMPRESSED_INT4 = COMPRESSED | {
    "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int", "strategy": "group"}}}
}

FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "block"}
COMPRESSED_BLOCK = COMPRESSED | {"config_groups": {"g": {"weights": FP8_WEIGHTS}}}
COMPRESSED_BLOCK_16 = COMPRESSED | {"config_groups": {"g": {"weights": FP8_WEIGHTS | {"block_structure": [16]}}}}


def fp8(weight: torch.Tensor, config: dict[str, Any]) -> Packed:
    """The nearest fp8 values under scales that differ from block to block, row to row."""
    num_outputs, num_inputs = weight.shape
    rows, columns = config.get("weight_block_size", (1, num_inputs))
    shape = (-(-num_outputs // rows), -(-num_inputs // columns))
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(num_outputs)) * 0.01 + 0.002
    name = "weight_scale_inv"
    if config is FP8_TENSOR:
        scales, shape, name = scales[:1], (1, 1), "weight_scale"
    elif "weight_block_size" not in config:
        name = "weight_scale"
    spread = torch.empty_like(weight)
    for n in range(num_outputs):
        for k in range(num_inputs):
            spread[n, k] = scales[min(n // rows, shape[0] - 1), k // columns]
    values = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    stored = scales[0] if config is FP8_TENSOR else scales
    return {"weight": values, name: stored, "input_scale": torch.ones(1)}, values.float() * spread


def int4(weight: torch.Tensor, config: dict[str, Any]) -> Packed:
    """Integers 0 to 15 around a zero point, packed nibble by nibble."""
    num_outputs, num_inputs = weight.shape
    size = num_inputs if config["group_size"] == -1 else config["group_size"]
    groups = [k // size for k in range(num_inputs)]
    generator = torch.Generator().manual_seed(num_inputs)
    if config.get("desc_act"):
        groups = [groups[k] for k in torch.randperm(num_inputs, generator=generator).tolist()]
    num_groups = max(groups) + 1
    scales = (torch.rand(num_groups, num_outputs, generator=generator) * 0.05 + 0.02).half()
    zeros = torch.randint(1, 16, (num_groups, num_outputs), generator=generator)
    quants = torch.empty(num_inputs, num_outputs, dtype=torch.int64)
    want = torch.empty(num_outputs, num_inputs)
    for k in range(num_inputs):
        g = groups[k]
        quants[k] = (weight[:, k] / scales[g].float() + zeros[g]).round().clamp(0, 15).long()
        want[:, k] = (quants[k] - zeros[g]) * scales[g].float()
    if config["quant_method"] == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return {"qweight": pack(quants, order), "qzeros": pack(zeros, order), "scales": scales}, want
    stored = zeros if config.get("checkpoint_format") == "gptq_v2" else zeros - 1
    plain = list(range(8))
    tensors = {"qweight": pack(quants.t(), plain).t(), "qzeros": pack(stored, plain), "scales": scales}
    return tensors | {"g_idx": torch.tensor(groups, dtype=torch.int32)}, want


def pack(values: torch.Tensor, order: list[int]) -> torch.Tensor:
    """[a, 8b] -> [a, b] int32: nibble i of a word holds the value `order[i]` of its eight."""
    words = []
    for row in values.tolist():
        for start in range(0, len(row), 8):
            word = sum(row[start + order[i]] << (4 * i) for i in range(8))
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
    return torch.tensor(words, dtype=torch.int32).view(values.shape[0], -1)


CASES: dict[str, tuple[dict[str, Any], Callable[..., Packed]]] = {
    "fp8 block": (FP8_BLOCK, fp8),
    "fp8 tensor": (FP8_TENSOR, fp8),
    "fp8 channel": (FP8_CHANNEL, fp8),
    "compressed-tensors channel": (COMPRESSED, fp8),
    "awq": (AWQ, int4),
    "gptq": (GPTQ, int4),
    "gptq v2, one group": (GPTQ_V2, int4),
    "gptq, inputs out of order": (GPTQ_ACT, int4),
}


@pytest.mark.parametrize("case", CASES)
def test_any_region_of_a_weight_is_what_was_packed(case: str) -> None:
    config, packer = CASES[case]
    weight = torch.randn(40, 48, generator=torch.Generator().manual_seed(0)) * 0.3
    tensors, want = packer(weight, config)
    parsed = parse_quantization({"quantization_config": config})
    assert parsed is not None
    items = list(tensors.items())
    # Spread over two files: a weight and its scale need not share one.
    files = [DictStateDict({f"layer.{name}": x for name, x in part}) for part in (items[:1], items[1:])]
    (view, rest) = dequantized(files, parsed)
    assert list(view.keys()) == ["layer.weight"]
    assert list(rest.keys()) == (["layer.input_scale"] if packer is fp8 else [])
    assert torch.equal(view.get_tensor("layer.weight"), want)
    for rows, columns in ((slice(0, 40), slice(16, 32)), (slice(8, 24), slice(0, 48)), (slice(3, 14), slice(5, 9))):
        region: Any = view
        assert torch.equal(region.get_slice("layer.weight")[rows, columns], want[rows, columns])


@pytest.mark.parametrize("case", ["fp8 block", "fp8 channel", "awq", "gptq"])
def test_a_quantized_checkpoint_runs_as_its_dequantized_twin(
    case: str,
    write_checkpoint: Callable[..., Any],
    paged: ModuleType,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config, packer = CASES[case]
    _, plain = write_checkpoint("qwen3", head_dim=8, num_key_value_heads=4)
    weights = load_file(plain / "model.safetensors")
    quantized, twin = dict(weights), dict(weights)
    for name, weight in weights.items():
        if "_proj." in name:
            del quantized[name]
            tensors, twin[name] = packer(weight, config)
            quantized |= {name.removesuffix("weight") + part: x.contiguous() for part, x in tensors.items()}
    raw = json.loads((plain / "config.json").read_text())
    for directory, tensors, extra in (("q", quantized, {"quantization_config": config}), ("t", twin, {})):
        (tmp_path / directory).mkdir()
        save_file(tensors, tmp_path / directory / "model.safetensors")
        (tmp_path / directory / "config.json").write_text(json.dumps(raw | extra))
    with caplog.at_level(logging.WARNING):
        model = load_model(tmp_path / "q")
    messages = [record.getMessage() for record in caplog.records if "dequantized" in record.getMessage()]
    assert len(messages) == 1
    assert str(config["quant_method"]) in messages[0]
    steps = zip(paged.run_steps(model), paged.run_steps(load_model(tmp_path / "t")), strict=True)
    assert all(torch.equal(ours, want) for (_, _, ours), (_, _, want) in steps)
    # Ranks read their share of the packed tensors.
    for rank in range(4):
        q, t = (load_model(tmp_path / name, tp_rank=rank, tp_size=4).state_dict() for name in ("q", "t"))
        assert all(torch.equal(q[name], t[name]) for name in t)


def test_a_quantized_weight_without_its_scale_is_named(write_checkpoint: Callable[..., Any]) -> None:
    _, directory = write_checkpoint("llama")
    weights = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, directory / "model.safetensors")
    change = {"quantization_config": FP8_BLOCK}
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(WeightError, match=r"wrong dtype: model\.layers\.0\.mlp\.up_proj\.weight \(F8_E4M3\)"):
        load_model(directory)
    with pytest.raises(ValueError, match="quantized layer layer lacks qzeros, scales"):
        dequantized([DictStateDict({"layer.qweight": torch.zeros(1, 8)})], Quantization(method="gptq", format="gptq"))


# The layer's weight is [40, 48]: how it was packed, what the config says, what the checkpoint holds besides, the fault.
MISFITS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor | None], str]] = {
    "larger blocks": (
        FP8_BLOCK,
        FP8_BLOCK | {"weight_block_size": [32, 32]},
        {},
        r"layer\.weight_scale_inv \(checkpoint \[3, 6\], expected \[2, 2\]\)",
    ),
    "smaller blocks": (
        FP8_BLOCK,
        FP8_BLOCK | {"weight_block_size": [8, 8]},
        {},
        r"layer\.weight_scale_inv \(checkpoint \[3, 6\], expected \[5, 6\]\)",
    ),
    "rows": (
        FP8_CHANNEL,
        FP8_CHANNEL,
        {"weight_scale": torch.ones(5, 3)},
        r"layer\.weight_scale \(checkpoint \[5, 3\], expected \[40, 1\] or \[1\]\)",
    ),
    "larger awq groups": (
        AWQ,
        AWQ | {"group_size": 32},
        {},
        r"layer\.qzeros \(checkpoint \[6, 5\], expected \[2, 5\]\)\n"
        r"  layer\.scales \(checkpoint \[6, 40\], expected \[2, 40\]\)",
    ),
    "awq groups by default": (
        AWQ,
        {key: value for key, value in AWQ.items() if key != "group_size"},
        {},
        r"layer\.qzeros \(checkpoint \[6, 5\], expected \[1, 5\]\)\n  layer\.scales ",
    ),
    "smaller gptq groups": (
        GPTQ,
        GPTQ | {"group_size": 8},
        {"g_idx": None},
        r"layer\.qzeros \(checkpoint \[3, 5\], expected \[6, 5\]\)\n  layer\.scales ",
    ),
    "gptq groups of too few inputs": (
        GPTQ,
        GPTQ,
        {"g_idx": torch.zeros(0, dtype=torch.int32)},
        r"layer\.g_idx \(checkpoint \[0\], expected \[48\]\)",
    ),
    "gptq zeros": (
        GPTQ,
        GPTQ,
        {"qzeros": torch.zeros(2, 5, dtype=torch.int32)},
        r"layer\.qzeros \(checkpoint \[2, 5\], expected \[3, 5\]\)",
    ),
    "a gptq group that is not there": (
        GPTQ,
        GPTQ,
        {"g_idx": torch.arange(48, dtype=torch.int32) // 8},
        r"layer\.g_idx \(groups 0 to 5, expected 0 to 2\)",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_scales_that_do_not_fit_their_weight_are_named(case: str) -> None:
    packed_with, config, changes, message = MISFITS[case]
    weight = torch.randn(40, 48, generator=torch.Generator().manual_seed(0)) * 0.3
    packer = fp8 if "fp8" in packed_with["quant_method"] else int4
    parsed = parse_quantization({"quantization_config": config})
    assert parsed is not None
    tensors = packer(weight, packed_with)[0] | changes
    files = [DictStateDict({f"layer.{name}": x}) for name, x in tensors.items() if x is not None]
    with pytest.raises(WeightError, match="the checkpoint does not fit its quantization_config\n  " + message):
        dequantized(files, parsed)


def test_an_fp8_tensor_that_is_no_weight_is_named() -> None:
    tensors = {"a.weight": torch.zeros(16).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(1)}
    with pytest.raises(WeightError, match=r"a\.weight \(checkpoint \[16\], expected two or three dimensions\)"):
        dequantized([DictStateDict(tensors)], Quantization(method="fp8", format="fp8"))


def test_all_scales_that_do_not_fit_are_in_one_error() -> None:
    weights = {f"{name}.weight": torch.zeros(16, 16).to(torch.float8_e4m3fn) for name in "ab"}
    scales = {f"{name}.weight_scale_inv": torch.ones(1, 1) for name in "ab"}
    with pytest.raises(WeightError, match=r"  a\.weight_scale_inv \(.*\n  b\.weight_scale_inv \("):
        dequantized(
            [DictStateDict(weights), DictStateDict(scales)], Quantization(method="fp8", format="fp8", block=(8, 8))
        )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported; supported: .*'awq'"),
        ({"bits": 4}, "quantization_config has no quant_method"),
        ("fp8", "quantization_config in config must be a mapping"),
        (AWQ | {"bits": 3}, "quant_method 'awq' is supported with 4 bits, got 3"),
        (AWQ | {"version": "gemv"}, "version gemm with zero points, got version 'gemv' and zero_point True"),
        (AWQ | {"zero_point": False}, "version gemm with zero points, got version 'gemm' and zero_point False"),
        (GPTQ | {"group_size": 0}, "group_size must be -1 or at least 1, got 0"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (FP8_BLOCK | {"weight_block_size": [128]}, r"weight_block_size must be two positive integers, got \[128\]"),
        (COMPRESSED_BLOCK, "config_groups has no block_structure"),
        (COMPRESSED_BLOCK_16, r"block_structure must be two positive integers, got \[16\]"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            "'modelopt' is supported with quant_algo 'FP8', got 'NVFP4'",
        ),
        (COMPRESSED_INT4, "8-bit float weights .* got .*'num_bits': 4"),
    ],
)
def test_formats_that_are_not_supported_are_named(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_quantization({"quantization_config": config})


def test_a_block_wise_compressed_checkpoint_names_its_blocks() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 64]}
    config = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": scheme}}}
    want = Quantization(method="compressed-tensors", format="fp8", block=(128, 64))
    assert parse_quantization({"quantization_config": config}) == want
    assert parse_quantization({}) is None
