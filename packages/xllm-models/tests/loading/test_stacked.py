"""Stacked parameters from every layout in which checkpoints store them: one tensor per expert, or one for all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from xllm_models import CausalLM, DictStateDict, TensorParallel, WeightError, WeightMap, load_model
from xllm_models.loading import SafetensorsStateDict, in_layer_layout
from xllm_models.models.qwen3_moe import Qwen3MoeForCausalLM

MOE = {"head_dim": 8, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "vocab_size": 96}
TOLERANCE = 5e-6
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def qwen(write_checkpoint: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """HF's model, its checkpoint with a tensor per expert, and the same with all experts in one tensor."""
    hf, directory = write_checkpoint("qwen3_moe", **MOE, decoder_sparse_step=1)
    fused = tmp_path_factory.mktemp("fused")
    hf.save_pretrained(fused, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(fused / "model.safetensors")
    return hf, directory, fused


def test_experts_in_one_tensor_equal_hf(qwen: Any, hf_logits: Callable[..., Any], paged: ModuleType) -> None:
    hf, _, fused = qwen
    want = hf_logits(hf)
    for sequence, start, logits in paged.run_steps(load_model(fused)):
        expected = want[sequence][start : start + len(logits)]
        assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_loads_the_same_from_both_spellings(size: int, dtype: str, qwen: Any) -> None:
    _, directory, fused = qwen
    for rank in range(size):
        one, other = (
            load_model(path, tp_rank=rank, tp_size=size, dtype=dtype).state_dict() for path in (directory, fused)
        )
        assert all(torch.equal(one[name], other[name]) for name in one)


def model_of(directory: Path, weight_map: WeightMap, rank: int = 0, size: int = 1) -> CausalLM:
    family = type("Family", (Qwen3MoeForCausalLM,), {"weight_map": weight_map})
    return family(json.loads((directory / "config.json").read_text()), tp=TensorParallel(rank=rank, size=size))


def relaid(tensors: Tensors, change: Callable[[str, torch.Tensor], Tensors]) -> Tensors:
    """The experts' tensors, each replaced by what `change` makes of it."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        found |= change(name, tensor) if ".mlp.experts." in name else {name: tensor}
    return found


def swapped(name: str, tensor: torch.Tensor) -> Tensors:
    return {name: tensor.mT.contiguous()}


def interleaved(name: str, tensor: torch.Tensor) -> Tensors:
    if "gate_up" not in name:
        return swapped(name, tensor)
    return {name: torch.stack(tensor.chunk(2, dim=1), dim=2).flatten(1, 2).mT.contiguous()}


def split(name: str, tensor: torch.Tensor) -> Tensors:
    if "gate_up" not in name:
        return {name: tensor}
    gate, up = (half.contiguous() for half in tensor.chunk(2, dim=1))
    return {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}


QWEN = Qwen3MoeForCausalLM.weight_map
EXPERTS = ("*.experts.gate_up_proj", "*.experts.down_proj")
SEPARATE = {"experts.gate_up": ("experts.gate_proj", "experts.up_proj"), "experts.down": ("experts.down_proj",)}
LAYOUTS: dict[str, tuple[Callable[..., Tensors], WeightMap]] = {
    "inputs first": (swapped, replace(QWEN, transposed=EXPERTS)),
    "inputs first, gate and up in turn": (interleaved, replace(QWEN, transposed=EXPERTS, interleaved=EXPERTS[:1])),
    "gate and up separate": (split, replace(QWEN, prestacked=SEPARATE)),
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_of_one_tensor(layout: str, size: int, qwen: Any, tmp_path: Path) -> None:
    _, directory, fused = qwen
    change, weight_map = LAYOUTS[layout]
    tensors = relaid(load_file(fused / "model.safetensors"), change)
    save_file(tensors, tmp_path / "model.safetensors")
    for source in (DictStateDict(tensors), SafetensorsStateDict(tmp_path / "model.safetensors")):
        for rank in range(size):
            model = model_of(directory, weight_map, rank, size)
            model.load_weights([source], rank, size)
            want = load_model(directory, tp_rank=rank, tp_size=size).state_dict()
            assert all(torch.equal(want[name], found) for name, found in model.state_dict().items())


def test_gpt_oss_layout_of_weights_and_biases(tmp_path: Path) -> None:
    """gpt-oss: inputs first, gate and up in turn, and a bias of each expert; HF splits them with [..., ::2]."""
    weight_map = WeightMap(transposed=("*.gate_up_proj", "*_bias"), interleaved=("*.gate_up_proj*",))
    stored = {"experts.gate_up_proj": torch.randn(3, 4, 10), "experts.gate_up_proj_bias": torch.randn(3, 10)}
    weight, bias = (torch.cat((tensor[..., ::2], tensor[..., 1::2]), dim=-1) for tensor in stored.values())
    save_file(stored, tmp_path / "model.safetensors")
    for source in (DictStateDict(stored), SafetensorsStateDict(tmp_path / "model.safetensors")):
        (found,) = in_layer_layout([source], weight_map)
        assert torch.equal(found.get_tensor("experts.gate_up_proj"), weight.mT)
        assert torch.equal(found.get_tensor("experts.gate_up_proj_bias"), bias)
        region: Any = found
        for rows in (slice(0, 5), slice(5, 10), slice(2, 8), slice(7, 9), slice(4, 5)):
            one, columns = slice(1, 2), slice(1, 3)
            got = region.get_slice("experts.gate_up_proj")[one, rows, columns]
            assert torch.equal(got, weight.mT[one, rows, columns])
            assert torch.equal(region.get_slice("experts.gate_up_proj_bias")[one, rows], bias[one, rows])


MIXTRAL = WeightMap(
    renamed={"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"},
    fused=QWEN.fused,
    stacked=QWEN.stacked,
    prestacked=QWEN.prestacked,
    tied=QWEN.tied,
)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_one_map_reads_mixtral_as_published_and_as_transformers_5_saves_it(
    size: int, write_checkpoint: Callable[..., Any], tmp_path: Path, qwen: Any
) -> None:
    config = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 16, "vocab_size": 96}
    hf, published = write_checkpoint("mixtral", **config, head_dim=8)
    hf.save_pretrained(tmp_path, save_original_format=False)
    names = [set(load_file(path / "model.safetensors")) for path in (published, tmp_path)]
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in names[0]
    assert "model.layers.0.mlp.experts.gate_up_proj" in names[1]

    def tensors(path: Path) -> Tensors:
        norms = {f"model.layers.{i}.self_attn.{x}_norm.weight": torch.ones(8) for i in range(2) for x in "qk"}
        return load_file(path / "model.safetensors") | norms

    experts = hf.model.layers[1].mlp.experts
    for rank in range(size):
        models = [model_of(qwen[1], MIXTRAL, rank, size) for _ in range(2)]
        for model, path in zip(models, (published, tmp_path), strict=True):
            model.load_weights([DictStateDict(tensors(path))], rank, size)
        one, other = (model.state_dict() for model in models)
        assert all(torch.equal(one[name], other[name]) for name in one)
        inner = slice(16 // size * rank, 16 // size * (rank + 1))
        assert torch.equal(one["model.layers.1.mlp.experts.down"], experts.down_proj[:, :, inner])


def fp8_blocks(tensor: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp8 values and scales of blocks of the last two dimensions, and their product."""
    sizes = [-(-tensor.shape[dim] // block[dim]) for dim in (-2, -1)]
    scales = torch.rand(*tensor.shape[:-2], *sizes, generator=torch.Generator().manual_seed(1)) * 0.01 + 0.002
    spread = scales.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    spread = spread[..., : tensor.shape[-2], : tensor.shape[-1]]
    values = (tensor / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values, scales, values.float() * spread


FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 8]}}
FP8_TENSOR = {"quantization_config": {"quant_method": "fp8"}}


def write(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    directory.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("size", [1, 2, 4])
def test_fp8_experts_in_one_tensor(size: int, qwen: Any, tmp_path: Path) -> None:
    _, _, fused = qwen
    raw = json.loads((fused / "config.json").read_text())
    plain = load_file(fused / "model.safetensors")
    blocks, twin = dict(plain), dict(plain)
    for name, tensor in plain.items():
        if ".mlp.experts." in name:
            blocks[name], blocks[f"{name}_scale_inv"], twin[name] = fp8_blocks(tensor, (16, 8))
    quantized = write(tmp_path / "fp8", raw | FP8, blocks)
    want = write(tmp_path / "twin", raw, twin)
    for rank in range(size):
        ours, expected = (load_model(x, tp_rank=rank, tp_size=size).state_dict() for x in (quantized, want))
        assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_fp8_experts_one_by_one(size: int, qwen: Any, tmp_path: Path) -> None:
    _, directory, _ = qwen
    raw = json.loads((directory / "config.json").read_text())
    plain = load_file(directory / "model.safetensors")
    blocks, twin = dict(plain), dict(plain)
    for name, tensor in plain.items():
        if ".mlp.experts." in name:
            blocks[name], blocks[f"{name}_scale_inv"], twin[name] = fp8_blocks(tensor, (16, 8))
    quantized, want = write(tmp_path / "fp8", raw | FP8, blocks), write(tmp_path / "twin", raw, twin)
    for rank in range(size):
        ours, expected = (load_model(x, tp_rank=rank, tp_size=size).state_dict() for x in (quantized, want))
        assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.parametrize("shape", [(5, 2, 1), (5, 1, 1), (5,), (5, 32, 1)])
def test_fp8_experts_with_a_scale_per_expert_half_or_row(shape: tuple[int, ...], qwen: Any, tmp_path: Path) -> None:
    _, _, fused = qwen
    raw = json.loads((fused / "config.json").read_text())
    plain = load_file(fused / "model.safetensors")
    scaled, twin = dict(plain), dict(plain)
    for name, tensor in plain.items():
        if name.endswith("gate_up_proj") and ".mlp.experts." in name:
            scale = torch.rand(shape) * 0.01 + 0.002
            rows = scale.view(5, -1).repeat_interleave(32 // (scale.numel() // 5), dim=1).unsqueeze(2)
            scaled[name] = (tensor / rows).clamp(-448, 448).to(torch.float8_e4m3fn)
            scaled[f"{name}_scale"], twin[name] = scale, scaled[name].float() * rows
    ours, expected = (
        load_model(path).state_dict()
        for path in (write(tmp_path / "fp8", raw | FP8_TENSOR, scaled), write(tmp_path / "twin", raw, twin))
    )
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_stacked_tensors_that_do_not_fit_are_named(qwen: Any, tmp_path: Path) -> None:
    _, directory, fused = qwen
    raw = json.loads((fused / "config.json").read_text())
    tensors = load_file(fused / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    faults: list[tuple[Tensors, dict[str, Any], str]] = [
        ({name: torch.zeros(5, 32, 33)}, {}, rf"wrong shape: {name} \(checkpoint \[5, 32, 33\], model \[5, 32, 32\]"),
        ({name: torch.zeros(4, 32, 32)}, {}, rf"wrong shape: {name} \(checkpoint \[4, 32, 32\]"),
        ({name: torch.zeros(5, 32, 32, dtype=torch.int8)}, {}, rf"wrong dtype: {name} \(I8\)"),
        ({f"{name}_scale_inv": torch.ones(5, 4, 4)}, FP8, rf"unexpected: {name}_scale_inv"),
        (
            {name: torch.zeros(5, 32, 32).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(5, 4, 4)},
            FP8,
            rf"{name}_scale_inv \(checkpoint \[5, 4, 4\], expected \[5, 2, 4\]\)",
        ),
        (
            {f"{name}.qweight": torch.zeros(5, 4, 32, dtype=torch.int32)},
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            rf"{name}\.qweight \(checkpoint \[5, 4, 32\], expected two dimensions\)",
        ),
    ]
    for number, (change, config, message) in enumerate(faults):
        path = write(tmp_path / str(number), raw | config, tensors | change)
        with pytest.raises(WeightError, match=message):
            load_model(path)
    # Without one expert of the other spelling, the error is in that spelling.
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.3.up_proj.weight"]
    with pytest.raises(WeightError, match=r"missing: model\.layers\.0\.mlp\.experts\.3\.up_proj\.weight$"):
        load_model(write(tmp_path / "missing", raw, tensors))


def test_both_spellings_at_once_are_refused(qwen: Any, tmp_path: Path) -> None:
    _, directory, fused = qwen
    both = load_file(directory / "model.safetensors") | load_file(fused / "model.safetensors")
    raw = json.loads((fused / "config.json").read_text())
    with pytest.raises(WeightError, match=r"unexpected: model\.layers\.0\.mlp\.experts\.0\.down_proj\.weight, "):
        load_model(write(tmp_path / "both", raw, both))
