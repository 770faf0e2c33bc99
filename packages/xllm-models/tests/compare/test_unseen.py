"""What a comparison could not compare, or could not see, is printed, and the comparison goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from xllm_models import CausalLM, load_model, registry
from xllm_models.__main__ import main
from xllm_models.compare import Report, Trace, compare_traces, trace_hf, trace_ours
from xllm_models.compare.hf import _traced
from xllm_models.compare.text import format_report
from xllm_models.models.qwen3 import Qwen3ForCausalLM

TOKEN_IDS = (5, 90, 3, 3, 41, 17, 60, 2)


@pytest.fixture(autouse=True)
def _forget_registered_models() -> Iterator[None]:
    yield
    registry._registered.clear()


@pytest.fixture(scope="module")
def sound(write_checkpoint: Callable[..., Any]) -> tuple[Path, Trace]:
    _, directory = write_checkpoint("qwen3", head_dim=8)
    return directory, trace_hf(directory, TOKEN_IDS, dtype=torch.float32, device="cpu")


def compare(model: CausalLM, reference: Trace, **more: Any) -> Report:
    return compare_traces(trace_ours(model, TOKEN_IDS), reference, model.weight_map, tolerance=1e-4, **more)


class Returns(nn.Module):
    def __init__(self, compute: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: torch.Tensor) -> Any:
        return self.compute(x)


class OfHf(nn.Module):
    """A model with HF's calling convention, whose modules return all that HF's modules return."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 12)
        self.heads_first = Returns(lambda x: x.view(1, 8, 3, 4).transpose(1, 2))
        self.heads_last = Returns(lambda x: x.view(1, 8, 3, 4))
        self.unclear = Returns(lambda x: x.new_zeros(1, 8, 8, 4))
        self.nothing = Returns(lambda x: None)
        self.number = Returns(lambda x: x.sum())
        self.mapping = Returns(lambda x: {"hidden": x})
        self.nested = Returns(lambda x: ((x, x), None))
        self.several = Returns(lambda x: (x, 2 * x, None))
        self.twice = Returns(lambda x: x)
        self.widths = Returns(lambda x: x)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        x = self.embed(input_ids)
        for _, module in self.named_children():
            if module is not self.embed:
                module(x)
        self.twice(x)
        self.widths(x[..., 1:])
        return SimpleNamespace(logits=x)


def test_every_output_of_hf_is_recorded_or_described() -> None:
    model = OfHf()
    trace = _traced(model, torch.tensor([TOKEN_IDS]))
    hidden = trace.entries["embed"]
    for name in ("heads_first", "heads_last", "several", "several[0]"):
        assert torch.equal(trace.entries[name], hidden)
    assert torch.equal(trace.entries["several[1]"], 2 * hidden)
    assert trace.unusable == {
        "unclear": "Tensor[1, 8, 8, 4]",
        "nothing": "None",
        "number": "Tensor[]",
        "mapping": "dict",
        "nested": "((Tensor[1, 8, 12], Tensor[1, 8, 12]), None)",
        "widths": "rows of 12 and of 11 values",
    }
    ours = Trace(token_ids=TOKEN_IDS)
    for name in ("embed", "unclear", "nothing", "twice", "several", "logits"):
        ours.add(name, hidden)
    ours.mark_unusable("heads_last", "dict")
    report = compare_traces(ours, trace, Qwen3ForCausalLM.weight_map, tolerance=1e-4)
    assert [entry.name for entry in report.entries] == ["embed", "several", "logits"]
    assert report.not_comparable == {
        "unclear": "ours is Tensor[8, 12], the reference's Tensor[1, 8, 8, 4]",
        "nothing": "ours is Tensor[8, 12], the reference's None",
        "twice": "ours is Tensor[8, 12], the reference's Tensor[16, 12]",
        "heads_last": "ours is dict, the reference's Tensor[8, 12]",
    }


def test_a_shape_of_our_own_is_not_comparable_and_the_rest_is(sound: tuple[Path, Trace]) -> None:
    directory, reference = sound
    model = load_model(directory)
    ours = trace_ours(model, TOKEN_IDS)
    name = "model.layers.1.mlp.down_proj"
    ours.entries[name] = ours.entries[name][:, 1:]
    report = compare_traces(ours, reference, model.weight_map, tolerance=1e-4)
    assert report.passed
    assert report.not_comparable == {name: "ours is Tensor[8, 31], the reference's Tensor[8, 32]"}
    text = format_report(report)
    assert f"not comparable: {name}: ours is Tensor[8, 31], the reference's Tensor[8, 32]" in text
    ours.entries["model.norm"] += 1
    assert not compare_traces(ours, reference, model.weight_map, tolerance=1e-4).passed


def test_a_port_maps_and_excludes_names(sound: tuple[Path, Trace]) -> None:
    directory, reference = sound
    model = load_model(directory)
    ours = trace_ours(model, TOKEN_IDS)
    down, mlp = "model.layers.1.mlp.down_proj", "model.layers.1.mlp"
    ours.entries["model.layers.1.mlp.output"] = ours.entries.pop(mlp)
    ours.entries[down] = ours.entries[down] + 1
    plain = compare_traces(ours, reference, model.weight_map, tolerance=1e-4)
    assert not plain.passed
    assert plain.only_ours == ("model.layers.1.mlp.output",)
    names = {"mlp.output": "mlp", "layers.1.mlp.down_proj": None}
    report = compare_traces(ours, reference, model.weight_map, tolerance=1e-4, names=names)
    assert report.passed
    assert report.only_ours == ()
    assert "model.layers.1.mlp.output" in [entry.name for entry in report.entries]
    assert down not in [entry.name for entry in report.entries]
    lines = format_report(report).splitlines()
    assert "declared by the port: layers.1.mlp.down_proj is not compared" in lines
    assert "declared by the port: mlp.output is compared with the reference's mlp" in lines
    # A mapping is no excuse: the value must be right.
    ours.entries["model.layers.1.mlp.output"] += 1
    wrong = compare_traces(ours, reference, model.weight_map, tolerance=1e-4, names=names)
    assert wrong.first_departure is not None
    assert wrong.first_departure.name == "model.layers.1.mlp.output"
    # A name that no module has is printed too, since it does nothing.
    unused = compare_traces(ours, reference, model.weight_map, tolerance=1e-4, names={"mlp.nothing": None})
    assert "declared by the port, but no module has the name: mlp.nothing" in format_report(unused)


class Renamed(Qwen3ForCausalLM):
    compare_names: ClassVar[Mapping[str, str | None]] = {"self_attn.o_proj": None, "model.norm": "model"}


def test_the_command_uses_what_the_port_declares(
    sound: tuple[Path, Trace], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "_registered", {"Qwen3ForCausalLM": Renamed})
    assert main(["compare", str(sound[0])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "declared by the port: self_attn.o_proj is not compared" in lines
    assert "declared by the port: model.norm is compared with the reference's model" in lines


def test_experts_that_no_token_chose_are_noted(
    write_checkpoint: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    experts = {"num_experts": 16, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    _, directory = write_checkpoint("qwen3_moe", head_dim=8, **experts)
    assert main(["compare", str(directory), "--prompt-ids", "1,2,3"]) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "experts" in line and line.startswith("note")]
    assert re.fullmatch(
        r"note: no token chose (2[6-9]|30) of 32 experts \(model\.layers\.0\.mlp\.gate: (\d+, ){3}\d+ and \d+ more; "
        r"model\.layers\.1\.mlp\.gate: (\d+, ){3}\d+ and \d+ more\): a longer prompt compares them",
        note,
    )


def test_keys_that_nobody_reads_are_noted(
    write_checkpoint: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    _, directory = write_checkpoint("llama")
    assert main(["compare", str(directory)]) == 0
    assert "nobody has read" not in capsys.readouterr().out
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"logit_multiplier": 8.0, "empty": None}))
    assert main(["compare", str(directory)]) == 0
    assert "note: keys of config.json that nobody has read: logit_multiplier=8.0" in capsys.readouterr().out


class OwnKeys(Qwen3ForCausalLM):
    own_config: ClassVar[Mapping[str, Any]] = {"in_build": 1.0, "in_logits": 1.0, "forgotten": 1.0}

    def build(self, config: Any, tp: Any) -> None:
        super().build(config, tp)
        assert config.own["in_build"] == 2.0

    def compute_logits(self, hidden: torch.Tensor, indices: torch.Tensor | None = None) -> torch.Tensor:
        assert self.config.own["in_logits"] == 3.0
        return super().compute_logits(hidden, indices)


def test_an_own_key_that_is_parsed_and_not_used_is_noted(
    write_checkpoint: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, directory = write_checkpoint("qwen3", head_dim=8)
    path = directory / "config.json"
    own = {"in_build": 2.0, "in_logits": 3.0, "forgotten": 4.0}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    monkeypatch.setattr(registry, "_registered", {"Qwen3ForCausalLM": OwnKeys})
    assert main(["compare", str(directory)]) == 0
    assert "note: keys of config.json that nobody has read: forgotten=4.0\n" in capsys.readouterr().out


def test_state_that_is_always_zero_is_noted(
    write_checkpoint: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    _, directory = write_checkpoint("llama", attention_bias=True)
    weights = load_file(directory / "model.safetensors")
    for name, weight in weights.items():
        if "layers.1.self_attn.v_proj" in name or name.endswith("o_proj.bias"):
            weight.zero_()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    assert main(["compare", str(directory)]) == 0
    out = capsys.readouterr().out
    assert "note: always zero during the run: the v cache of layer 1: a port that ignores them may pass" in out
    assert "note: model.layers.0.self_attn.o_proj.bias and 1 more have the same value everywhere" in out


def test_hf_modules_that_were_not_compared_by_themselves_are_listed(
    sound: tuple[Path, Trace], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(sound[0])]) == 0
    line = "compared only within the modules around them: model.layers.*.self_attn.q_norm, "
    assert line + "model.layers.*.self_attn.k_norm\n" in capsys.readouterr().out
