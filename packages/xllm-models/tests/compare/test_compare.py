"""The compare tool: sound models of every family pass, planted faults are found where they are, bad input is named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from xllm_models import CausalLM, load_model
from xllm_models.__main__ import main
from xllm_models.compare import Report, Trace, compare_traces, read_dump, trace_hf, trace_ours, write_dump
from xllm_models.compare.blind_spots import blind_spots
from xllm_models.compare.trace import observed

REPOSITORY = Path(__file__).parents[4]
TOKEN_IDS = (5, 90, 3, 3, 41, 17, 60, 2)
LINEAR = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
SHARED_EXPERT = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
FAMILIES = {
    "gemma3_text": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 5},
    "mixtral": {"head_dim": 8, "num_local_experts": 4, "sliding_window": 5},
    "olmo2": {},
    "glm4": {"head_dim": 16, "pad_token_id": None},
    "glm4_moe": {
        "head_dim": 8, "use_qk_norm": True, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7,
    },
    "phi3": {"pad_token_id": None},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen3_next": LINEAR | SHARED_EXPERT,
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | SHARED_EXPERT,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes(
    family: str, write_checkpoint: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    _, directory = write_checkpoint(family, **FAMILIES[family])
    assert main(["compare", str(directory)]) == 0
    out = capsys.readouterr().out
    assert "PASS: all" in out
    assert "first choices: 24 of 24 the same" in out
    # Every module meets its counterpart: no more than the norms inside qk_norm_rope stay unseen.
    assert "without a counterpart" not in out
    for module in ("embed_tokens", "layers.1.self_attn.qkv_proj", "layers.1.self_attn.attn.q", "layers.1.mlp", "norm"):
        assert f"model.{module} " in out
    if "linear_num_key_heads" in FAMILIES[family]:
        for module in ("norm", "out_proj"):
            assert f"model.layers.0.linear_attn.{module} " in out


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_in_bfloat16(
    family: str, write_checkpoint: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    _, directory = write_checkpoint(family, **FAMILIES[family])
    assert main(["compare", str(directory), "--dtype", "bfloat16"]) == 0, capsys.readouterr().out


@pytest.fixture(scope="module")
def sound(write_checkpoint: Callable[..., Any]) -> tuple[Path, Trace]:
    """A Qwen3 checkpoint whose o_proj is square, and HF's trace of it."""
    _, directory = write_checkpoint("qwen3", head_dim=8, num_hidden_layers=3, rms_norm_eps=1e-6)
    return directory, trace_hf(directory, TOKEN_IDS, dtype=torch.float32, device="cpu")


def transpose(model: CausalLM) -> None:
    weight = model.get_submodule("model.layers.1.self_attn.o_proj").weight
    assert isinstance(weight, torch.Tensor)
    weight.copy_(weight.t().clone())


def shift_rope(model: CausalLM) -> None:
    # Relative positions stay as they are, so the logits do too: only queries and keys show it.
    table = model.get_submodule("model.layers.0.self_attn.rotary_emb").cos_sin
    assert isinstance(table, torch.Tensor)
    table[:-1] = table[1:].clone()


def scale_logits(model: CausalLM) -> None:
    # After the head, which is the last module: no module shows it.
    compute = model.compute_logits
    model.compute_logits = lambda hidden, indices=None: compute(hidden, indices) * 1.01  # type: ignore[method-assign]


def change_eps(model: CausalLM) -> None:
    norm: Any = model.get_submodule("model.layers.2.post_attention_layernorm")
    norm.eps = 0.05  # the variance is about 30 here


def change_first_eps(model: CausalLM) -> None:
    norm: Any = model.get_submodule("model.layers.0.input_layernorm")
    norm.eps = 1e-4


def change_head_eps(model: CausalLM) -> None:
    norm: Any = model.get_submodule("model.layers.1.self_attn.q_norm")
    norm.eps = 0.1


def break_last_value(model: CausalLM) -> None:
    weight = model.get_submodule("model.layers.2.mlp.down_proj").weight
    assert isinstance(weight, torch.Tensor)
    weight[0, 0] = torch.nan


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (transpose, "model.layers.1.self_attn.o_proj"),
        (shift_rope, "model.layers.0.self_attn.attn.q"),
        (change_eps, "model.layers.2.post_attention_layernorm"),
        (change_first_eps, "model.layers.0.input_layernorm"),
        (change_head_eps, "model.layers.1.self_attn.attn.q"),
        (scale_logits, "logits"),
        (break_last_value, "model.layers.2.mlp.down_proj"),
    ],
)
def test_a_planted_fault_is_found_where_it_is(
    plant: Callable[[CausalLM], None], name: str, sound: tuple[Path, Trace]
) -> None:
    directory, reference = sound
    model = load_model(directory, max_model_len=len(TOKEN_IDS) + 1)
    assert compare(model, reference).passed
    with torch.no_grad():
        plant(model)
    report = compare(model, reference)
    assert not report.passed
    assert report.first_departure is not None
    assert report.first_departure.name == name


def compare(model: CausalLM, reference: Trace) -> Report:
    return compare_traces(trace_ours(model, TOKEN_IDS), reference, model.weight_map, tolerance=1e-4)


def test_a_faulty_checkpoint_fails_against_a_dump_of_the_sound_one(
    write_checkpoint: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, directory = write_checkpoint("qwen3", seed=3, head_dim=8)
    dumps, plot = tmp_path / "dumps", tmp_path / "errors.png"
    ids = ",".join(map(str, TOKEN_IDS))
    arguments = ["compare", str(directory), "--prompt-ids", ids, "--dump", str(dumps), "--plot", str(plot)]
    assert main(arguments) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    weights = load_file(directory / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    weights[name] = weights[name].flip(0)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    for dump in ("ours", "reference"):
        capsys.readouterr()
        again = ["compare", str(directory), "--against", str(dumps / f"{dump}.safetensors"), "--plot", str(plot)]
        assert main(again) == 1
        out = capsys.readouterr().out
        assert "FAIL: model.layers.1.self_attn.qkv_proj departs first" in out
        assert "model.layers.1.self_attn.o_proj" in out


def test_dumps_read_back(tmp_path: Path, sound: tuple[Path, Trace]) -> None:
    write_dump(sound[1], tmp_path / "dump")
    again = read_dump(tmp_path / "dump")
    assert again.token_ids == TOKEN_IDS
    assert list(again.entries) == list(sound[1].entries)
    assert all(torch.equal(value, sound[1].entries[name]) for name, value in again.entries.items())


def test_hooks_see_direct_forward_calls_and_leave_no_trace() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner.forward(x)
            return out

    seen = []
    outer = Outer()
    with observed(outer, lambda name, module, args, output: seen.append(name)):
        outer.forward(torch.zeros(1, 2))
    assert seen == ["inner", ""]
    outer.forward(torch.zeros(1, 2))
    assert seen == ["inner", ""]
    assert "forward" not in vars(outer)


def test_traces_that_do_not_fit_are_named(sound: tuple[Path, Trace]) -> None:
    directory, reference = sound
    model = load_model(directory)
    ours = trace_ours(model, TOKEN_IDS[:1])
    with pytest.raises(ValueError, match="different tokens: 1 and 8"):
        compare_traces(ours, reference, model.weight_map, tolerance=1e-4)
    ours = trace_ours(model, TOKEN_IDS)
    headless = {name: value for name, value in reference.entries.items() if name != "logits"}
    narrow = reference.entries | {"logits": reference.entries["logits"][:, 1:]}
    for entries, message in (
        (headless, "the reference has no logits"),
        (narrow, r"logits are \[8, 97\], but the reference has \[8, 96\]"),
    ):
        with pytest.raises(ValueError, match=message):
            compare_traces(ours, Trace(token_ids=TOKEN_IDS, entries=entries), model.weight_map, tolerance=1e-4)


class ResidualLayerNorm(nn.Module):
    """A norm of a port's own that hands on the residual; what it contains makes it no decoder layer."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.inner = norm

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out: tuple[torch.Tensor, torch.Tensor] = self.inner(x, residual)
        return out


def test_a_residual_norm_of_another_class_is_compared_by_what_it_normed(sound: tuple[Path, Trace]) -> None:
    directory, reference = sound
    model = load_model(directory, max_model_len=len(TOKEN_IDS) + 1)
    layer: Any = model.get_submodule("model.layers.1")
    layer.post_attention_layernorm = ResidualLayerNorm(layer.post_attention_layernorm)
    report = compare(model, reference)
    assert report.passed
    assert "model.layers.1.post_attention_layernorm" in [entry.name for entry in report.entries]


def test_what_a_checkpoint_hides_is_noted(
    write_checkpoint: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    _, directory = write_checkpoint("mistral", sliding_window=8)
    model = load_model(directory)
    assert list(blind_spots(model, 9)) == []
    assert list(blind_spots(model, 8)) == [
        "no query of 8 tokens leaves a sliding window of 8: a longer prompt compares windows"
    ]
    weights = load_file(directory / "model.safetensors")
    for name, weight in weights.items():
        if "input_layernorm" in name:
            weight.fill_(1.0)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    assert main(["compare", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "note: model.layers.0.input_layernorm.weight and 1 more have the same value everywhere: a port that ignores "
        "them may pass"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int8"], "dtype 'int8' is not supported"),
        (["--prompt-ids", "5,97"], "each below the vocabulary of 97, got (5, 97)"),
        (["--prompt-ids", "5", "--prompt", "text"], "exclude each other"),
        (["--against", "nowhere"], "dump nowhere does not exist"),
        (["--against", __file__], "is not a dump of a comparison"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], message: str, sound: tuple[Path, Trace], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(sound[0]), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_optional_library_is_named(
    sound: tuple[Path, Trace],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["compare", str(sound[0]), "--prompt-ids", "1,2", "--plot", str(tmp_path / "x.png")]) == 2
    assert "matplotlib is not installed: pip install 'xllm-models[compare]'" in capsys.readouterr().err


def test_a_real_checkpoint_passes(capsys: pytest.CaptureFixture[str]) -> None:
    directory = REPOSITORY / ".cache" / "models" / "smollm2-135m-instruct"
    if not directory.is_dir():
        front = {"cwd": REPOSITORY / "integration" / "python", "timeout": 600, "check": True}
        subprocess.run([sys.executable, "-m", "xllm_text", "fetch", "--out", str(directory)], **front)
    assert main(["compare", str(directory), "--prompt", "The capital of France is"]) == 0
    out = capsys.readouterr().out
    assert "PASS: all" in out
    assert "model.layers.29.mlp.down_proj" in out


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_latent_attention_passes_without_the_modules_that_hf_expands(
    family: str, dtype: str, write_checkpoint: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
    experts = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 4,
        "topk_group": 2,
    }
    _, directory = write_checkpoint(family, num_key_value_heads=4, first_k_dense_replace=1, **sizes, **experts)
    assert main(["compare", str(directory), "--dtype", dtype]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert "PASS: all" in out
    assert "not comparable" not in out
    for module in ("q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "o_proj"):
        assert f"model.layers.1.self_attn.{module} " in out
