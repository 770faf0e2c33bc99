"""The compare tool on mixtures of experts: right models pass in bfloat16 although ties flip, router faults fail."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig

from xllm_models import CausalLM, load_model, registry
from xllm_models.__main__ import main
from xllm_models.compare import Report, Trace, compare_traces, read_dump, trace_hf, trace_ours, write_dump
from xllm_models.compare.forcing import forcing
from xllm_models.compare.routing import Choice
from xllm_models.compare.text import format_report
from xllm_models.layers import TopKRouter
from xllm_models.loading.model import register_port
from xllm_models.ops import topk_softmax

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 4, "norm_topk_prob": True}
GROUPS = {
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "head_dim": 8,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 4, "head_dim": 8},
    "qwen3_moe": EXPERTS | {"head_dim": 8, "num_experts": 16},
    "mixtral": EXPERTS | {"head_dim": 8, "num_local_experts": 16, "intermediate_size": 16},
    "dots1": EXPERTS | GROUPS,
    "glm4_moe": EXPERTS | GROUPS,
}
PORTS = {"dots1": "sigmoid_port:Dots1ForCausalLM"}


@pytest.fixture(autouse=True)
def _ports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    yield
    registry._registered.clear()
    sys.modules.pop("sigmoid_port", None)


@pytest.fixture(scope="module")
def checkpoints(write_checkpoint: Callable[..., Any]) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = write_checkpoint(family, **MODELS[family])[1]
        return made[family]

    return get


def prompts() -> list[tuple[int, ...]]:
    return [tuple(Random(seed).choices(range(97), k=24)) for seed in range(20)]


def compared(model: CausalLM, directory: Path, ids: tuple[int, ...], *, tolerance: float = 0.1) -> Report:
    ours = trace_ours(model, ids)
    theirs = trace_hf(directory, ids, dtype=model.dtype, device="cpu", choices=ours.choices)
    return compare_traces(ours, theirs, model.weight_map, tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_right_models_pass_on_every_prompt_in_bfloat16(family: str, checkpoints: Callable[[str], Path]) -> None:
    directory = checkpoints(family)
    if family in PORTS:
        register_port(PORTS[family], directory)
    model = load_model(directory, dtype=torch.bfloat16)
    reports = [compared(model, directory, ids) for ids in prompts()]
    assert [str(flip) for report in reports for flip in report.flips if flip.beyond_rounding] == []
    assert [report.first_departure for report in reports] == [None] * 20
    assert sum(len(report.flips) for report in reports) > 0  # else the prompts show nothing


class _Biased(TopKRouter):
    """Chooses and weighs the experts by other logits than it returns."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = functional.linear(x, self.weight)
        biased = logits + torch.linspace(0.0, 1.5, 16, dtype=x.dtype)
        return logits, *topk_softmax(biased, self.top_k, self.normalize)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_choice_by_other_scores_is_named(dtype: torch.dtype, checkpoints: Callable[[str], Path]) -> None:
    directory = checkpoints("qwen3_moe")
    model = load_model(directory, dtype=dtype)
    layer: Any = model.get_submodule("model.layers.2")
    layer.mlp.gate.__class__ = _Biased
    report = compared(model, directory, prompts()[0])
    assert not report.passed
    flip = report.first_wrong_flip
    assert flip is not None
    assert flip.router == "model.layers.2.mlp.gate"
    assert flip.margin > 2 * flip.rounding
    assert report.flip_is_first
    verdict = format_report(report).splitlines()[-1]
    assert re.fullmatch(
        r"FAIL: model\.layers\.2\.mlp\.gate: token \d+ goes to expert \d+(, \d+)?, the reference's to \d+(, \d+)?: "
        r"margin \d\.\d\de[-+]\d\d, rounding \d\.\d\de[-+]\d\d \(\d+ of \d+ flips are beyond rounding\)",
        verdict,
    )
    # HF's model was made to choose the same, so no later layer departs: the fault is in that router alone.
    assert all(flip.router == "model.layers.2.mlp.gate" for flip in report.flips if flip.beyond_rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forgotten_correction_bias_is_named(
    dtype: torch.dtype, checkpoints: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = checkpoints("dots1")
    arguments = ["compare", str(directory), "--model", "sigmoid_port:WithoutBias", "--dtype", str(dtype)]
    assert main(arguments) == 1
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict.startswith("FAIL: model.layers.2.mlp.gate: token ")


def test_another_routers_weight_departs_at_its_logits(checkpoints: Callable[[str], Path]) -> None:
    directory = checkpoints("qwen3_moe")
    model = load_model(directory, dtype=torch.bfloat16)
    weight: Any = model.get_submodule("model.layers.1.mlp.gate").weight
    weight.copy_(weight.roll(1, 0))
    report = compared(model, directory, prompts()[0])
    assert report.first_departure is not None
    assert report.first_departure.name == "model.layers.1.mlp.gate"
    assert not report.flip_is_first


def test_a_dump_is_compared_up_to_the_first_token_with_other_experts(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = checkpoints("qwen3_moe")
    model = load_model(directory, dtype=torch.bfloat16)
    ids, ours, free = next(
        (ids, ours, free)
        for ids in prompts()
        if (ours := trace_ours(model, ids))
        and (free := trace_hf(directory, ids, dtype=model.dtype, device="cpu"))
        and compare_traces(ours, free, model.weight_map, tolerance=0.1).left_out
    )
    write_dump(free, tmp_path / "dump")
    report = compare_traces(ours, read_dump(tmp_path / "dump"), model.weight_map, tolerance=0.1)
    assert report.passed
    router, token = next(iter(report.left_out.items()))
    assert report.flips[0].router == router
    assert len(report.positions) == min(report.left_out.values()) < len(ids)
    text = format_report(report)
    assert f"left out from {router} on: token {token} and all later ones, which attend to it" in text
    # The dump of a comparison has the experts that both models used: nothing is left out.
    forced = trace_hf(directory, ids, dtype=model.dtype, device="cpu", choices=ours.choices)
    write_dump(forced, tmp_path / "dump")
    again = compare_traces(ours, read_dump(tmp_path / "dump"), model.weight_map, tolerance=0.1)
    assert again.passed
    assert not again.left_out
    # A fault before the first flip shows in spite of it.
    ours.entries["model.layers.0.self_attn.o_proj"][0] += 10
    assert not compare_traces(ours, free, model.weight_map, tolerance=0.1).passed


@torch.no_grad()
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_a_router_of_hf_is_made_to_choose(family: str, groups: tuple[int, int]) -> None:
    modeling: Any = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    number, top = groups
    config = AutoConfig.for_model(
        family, hidden_size=32, n_routed_experts=16, num_experts_per_tok=4, n_group=number, topk_group=top,
        topk_method="group_limited_greedy" if number > 1 else "greedy", norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    name = "DeepseekV2TopkRouter" if family == "deepseek_v2" else "DeepseekV3TopkRouter"
    model = nn.ModuleDict({"gate": getattr(modeling, name)(config)})
    router: Any = model["gate"]
    router.weight.data.normal_()
    hidden = torch.randn(5, 32)
    _, _, free = router(hidden)
    wanted = free.clone()
    wanted[2] = torch.tensor([0, 1, 14, 15])  # of the first and the last group
    trace = Trace(token_ids=(0,) * 5)
    choice = Choice(experts=wanted, num_experts=16, inputs=hidden)
    with forcing(model, {"gate": choice}, trace):
        logits, weights, chosen = router(hidden)
    assert chosen[2].sort().values.tolist() == [0, 1, 14, 15]
    assert torch.equal(chosen[[0, 1, 3, 4]].sort().values, free[[0, 1, 3, 4]].sort().values)
    scores = logits.softmax(-1) if family == "deepseek_v2" else logits.sigmoid()
    expected = scores[2, chosen[2]]
    assert torch.allclose(weights[2] / weights[2].sum(), expected / expected.sum(), rtol=1e-5)
    assert [flip.token for flip in trace.flips] == [2]
    assert trace.flips[0].beyond_rounding
    assert trace.flips[0].margin < 100
    assert torch.equal(router(hidden)[2], free)


@torch.no_grad()
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize(("gap", "beyond"), [(1e-6, False), (0.5, True)])
def test_another_group_is_judged_by_the_scores_of_groups(family: str, gap: float, beyond: bool) -> None:
    """DeepSeek-V2 gives the experts outside of the chosen groups the score 0, the others minus infinity."""
    modeling: Any = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = AutoConfig.for_model(
        family, hidden_size=32, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2,
        topk_method="group_limited_greedy", norm_topk_prob=True,
    )  # fmt: skip
    name = {"deepseek_v2": "DeepseekV2TopkRouter", "deepseek_v3": "DeepseekV3TopkRouter"}
    model = nn.ModuleDict({"gate": getattr(modeling, name.get(family, "Glm4MoeTopkRouter"))(config)})
    router: Any = model["gate"]
    logits = torch.tensor([3.0, 2.5, 0.0, 0.0, 2.0, 1.5, 0.0, 0.0, 2.0 - gap, 1.5, 0.0, 0.0, -3.0, -3.0, -3.0, -3.0])
    router.weight.data.zero_()[:, 0] = logits
    hidden = torch.eye(32)[:1]
    assert sorted(router(hidden)[2][0].tolist()) == [0, 1, 4, 5]
    trace = Trace(token_ids=(0,))
    choice = Choice(experts=torch.tensor([[0, 1, 8, 9]]), num_experts=16, inputs=hidden)
    with forcing(model, {"gate": choice}, trace):
        assert sorted(router(hidden)[2][0].tolist()) == [0, 1, 8, 9]
    (flip,) = trace.flips
    assert flip.beyond_rounding == beyond
    assert flip.margin < gap
