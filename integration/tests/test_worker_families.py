"""The worker on small random models of families with experts, other norms, or a vision tower: tokens of transformers.

Prompts in chunks share steps with decodes, and the cache is too small for all requests, so that some are preempted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

Events = list[dict[str, Any]]
Answers = Callable[[Events], dict[str, list[int]]]
HfGreedy = Callable[[Path, list[list[int]], int, int | None], list[list[int]]]

PROMPTS = [[5], [7, 8, 9], list(range(10, 27)), list(range(30, 80)), [3] * 100]
FLAGS = ["--dtype=float32", "--max_seqs_per_batch=5", "--max_tokens_per_batch=16", "--block_size=4", "--num_blocks=40"]
VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "sliding_window": 24},
    "olmo2": {},
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2,
        "use_qk_norm": True, "routed_scaling_factor": 1.5,
    },
    "gemma3": {"sliding_window": 24, "sliding_window_pattern": 2, "head_dim": 16, "query_pre_attn_scalar": 16},
}  # fmt: skip


@pytest.fixture(scope="session", params=FAMILIES)
def checkpoint(
    request: pytest.FixtureRequest, small_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A small random model, saved by transformers. Gemma 3 is a checkpoint of a text and a vision model."""
    torch.manual_seed(7)
    family, text = request.param, small_config | FAMILIES[request.param]
    special = {name: text.pop(name) for name in ("bos_token_id", "eos_token_id")}
    if family == "gemma3":
        vision = {"vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": 255}
        config = AutoConfig.for_model(family, text_config=text | special, **vision, **special)
        model: Any = AutoModelForImageTextToText.from_config(config)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **text, **special))
    with torch.no_grad():  # large enough for tokens that depend on the whole prompt
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
    folder = tmp_path_factory.mktemp(family)
    model.save_pretrained(folder)
    return folder


def test_tokens_equal_transformers(checkpoint: Path, hf_greedy: HfGreedy, worker_path: Path, answers: Answers) -> None:
    from xllm_text.worker import Worker

    expected = hf_greedy(checkpoint, PROMPTS, 40, None)
    events: Events = []
    with Worker([str(worker_path), f"--model={checkpoint}", "--device=cpu", *FLAGS]) as worker:
        worker.ready()
        worker.send({"command": "pause"})
        for i, prompt in enumerate(PROMPTS):
            worker.send({"id": f"r{i}", "token_ids": prompt, "max_tokens": 40, "ignore_eos": True})
        worker.send({"command": "resume"})
        while sum(event.get("finished", False) for event in events) < len(PROMPTS):
            events.append(worker.read_event())
            assert "error" not in events[-1]
        worker.send({"command": "stats"})
        stats = worker.read_event()["scheduler"]
        assert worker.close() == 0
    got = answers(events)
    assert [got[f"r{i}"] for i in range(len(PROMPTS))] == expected
    assert len({token for tokens in expected for token in tokens}) > 10
    assert stats["num_preemptions"] > 0
