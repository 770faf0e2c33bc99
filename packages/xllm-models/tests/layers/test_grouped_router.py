"""Routers over groups of experts against transformers': the same experts and weights, in ties and on each dtype."""

from __future__ import annotations

import importlib
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from xllm_models import ModelConfig
from xllm_models.layers import GROUPED_ROUTING, GroupedSigmoidRouter, GroupedSoftmaxRouter

HIDDEN = 24
SIGMOID = {"deepseek_v3": "DeepseekV3TopkRouter", "glm4_moe": "Glm4MoeTopkRouter"}


def hf_router(family: str, class_name: str, **config: Any) -> Any:
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    router = getattr(modeling, class_name)(
        AutoConfig.for_model(family, hidden_size=HIDDEN, num_attention_heads=4, **config)
    )
    router.weight.data.normal_()
    return router


def draw(case: int) -> dict[str, Any]:
    """The sizes of a router: groups, some of them chosen, and k experts that fit into those."""
    rng = Random(case)
    num_groups = rng.choice((1, 2, 4, 8))
    group_size = rng.choice((2, 3, 8))
    top_groups = rng.randrange(1, num_groups + 1)
    return {
        "n_routed_experts": num_groups * group_size,
        "num_experts_per_tok": rng.randrange(1, min(8, top_groups * group_size) + 1),
        "n_group": num_groups,
        "topk_group": top_groups,
        "routed_scaling_factor": rng.choice((1.0, 2.5)),
        "moe_intermediate_size": 8,
    }


def parsed(config: dict[str, Any]) -> ModelConfig:
    sizes = {"vocab_size": 9, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4}
    other = {"model_type": "other", "hidden_size": HIDDEN, "max_position_embeddings": 8}
    return ModelConfig.from_dict(sizes | other | config, own={**GROUPED_ROUTING, "topk_method": "greedy"})


def plant_ties(router: Any, case: int) -> None:
    """Experts with equal weights, within a group and in different groups, and groups with equal scores."""
    num_experts = router.weight.shape[0]
    if case % 3 == 1:
        router.weight[1::2] = router.weight[: num_experts - num_experts % 2 : 2][: len(router.weight[1::2])]
    elif case % 3 == 2:
        half = num_experts // 2
        router.weight[half : 2 * half] = router.weight[:half]


def check(ours: Any, theirs: Any, dtype: torch.dtype) -> None:
    x = torch.randn(33, HIDDEN).to(dtype)
    x[5] = 0.0  # every score is the same
    logits, weights, ids = ours(x)
    want_logits, want_weights, want_ids = theirs(x)
    assert torch.equal(logits, want_logits)
    assert torch.equal(ids, want_ids)
    assert torch.equal(weights, want_weights)
    assert (logits.dtype, weights.dtype) == (torch.float32, torch.float32)
    assert ours(x[:0])[2].shape == (0, ids.shape[1])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", range(12))
@pytest.mark.parametrize("family", sorted(SIGMOID))
def test_sigmoid_router_equals_hf(family: str, case: int, dtype: torch.dtype) -> None:
    torch.manual_seed(case)
    config = draw(case) | {"norm_topk_prob": case % 2 == 0}
    theirs = hf_router(family, SIGMOID[family], **config)
    ours = GroupedSigmoidRouter(parsed(config))
    plant_ties(theirs, case)
    if case % 3 == 0:  # a bias would end the ties
        theirs.e_score_correction_bias.copy_(torch.randn_like(theirs.e_score_correction_bias))
    ours.load_state_dict(theirs.state_dict())
    check(ours, theirs, dtype)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", range(12))
@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_softmax_router_equals_hf(method: str, case: int, dtype: torch.dtype) -> None:
    torch.manual_seed(case)
    config = draw(case) | {"topk_method": method}
    theirs = hf_router("deepseek_v2", "DeepseekV2TopkRouter", **config)
    ours = GroupedSoftmaxRouter(parsed(config))
    plant_ties(theirs, case)
    ours.load_state_dict(theirs.state_dict())
    check(ours, theirs, dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_group": 3}, "n_group 3 does not divide the 8 experts"),
        ({"n_group": 0}, "n_group 0 does not divide the 8 experts"),
        ({"n_group": 4, "topk_group": 5}, "topk_group 5 is outside 1 to n_group 4"),
        ({"n_group": 4, "topk_group": 0}, "topk_group 0 is outside 1 to n_group 4"),
        (
            {"n_group": 4, "num_experts_per_tok": 3},
            "num_experts_per_tok 3 exceeds the 2 experts of topk_group 1 groups",
        ),
        ({"n_group": 8, "topk_group": 8}, "n_group 8 leaves fewer than 2 of 8 experts per group"),
        ({"n_routed_experts": 0}, "the config of other has no n_routed_experts"),
    ],
)
def test_groups_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    config = parsed({"n_routed_experts": 8, "num_experts_per_tok": 2} | change)
    with pytest.raises(ValueError, match=message):
        GroupedSigmoidRouter(config)


def test_an_unknown_method_is_refused() -> None:
    config = parsed({"n_routed_experts": 8, "num_experts_per_tok": 2, "topk_method": "noaux_tc"})
    with pytest.raises(ValueError, match="topk_method 'noaux_tc' is not supported; supported: greedy, group_limited"):
        GroupedSoftmaxRouter(config)
