"""Small random checkpoints of families with experts, states, sinks, windows or a vision tower, and requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

Events = list[dict[str, Any]]
Answers = Callable[[Events], dict[str, list[int]]]

VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
LINEAR = {
    "head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 12,
}  # fmt: skip
LATENT = {  # one cache tensor per layer
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "sliding_window": 24},
    "olmo2": {},
    "glm4": {"head_dim": 16, "pad_token_id": None},
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2,
        "use_qk_norm": True, "routed_scaling_factor": 1.5,
    },
    "qwen3_next": LINEAR | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
    },
    "qwen3_5_text": LINEAR,
    "deepseek_v2": LATENT | {"q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT | {"q_lora_rank": 24, "first_k_dense_replace": 1},
    "gpt_oss": {"head_dim": 16, "sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3": {"sliding_window": 24, "sliding_window_pattern": 2, "head_dim": 16, "query_pre_attn_scalar": 16},
}  # fmt: skip


def save(family: str, small_config: dict[str, Any], folder: Path) -> Path:
    """Saves a small random model. Gemma 3 is a checkpoint of a text and a vision model."""
    torch.manual_seed(7)
    text = small_config | FAMILIES[family]
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
    model.save_pretrained(folder)
    return folder


def serve(
    command: list[str],
    prompts: list[list[int]],
    answers: Answers,
    *,
    together: bool = True,
    num_tokens: int = 40,
) -> tuple[list[list[int]], dict[str, Any]]:
    """`num_tokens` tokens of each prompt, and the scheduler's counts.

    Sends all requests at once, or each after the last one.
    """
    from xllm_text.worker import Worker

    events: Events = []

    def read_until(num_finished: int) -> None:
        while sum(event.get("finished", False) for event in events) < num_finished:
            events.append(worker.read_event())
            assert "error" not in events[-1]

    with Worker(command) as worker:
        worker.ready()
        if together:
            worker.send({"command": "pause"})
        for i, prompt in enumerate(prompts):
            worker.send({"id": f"r{i}", "token_ids": prompt, "max_tokens": num_tokens, "ignore_eos": True})
            if not together:
                read_until(i + 1)
        if together:
            worker.send({"command": "resume"})
        read_until(len(prompts))
        worker.send({"command": "stats"})
        stats = worker.read_event()["scheduler"]
        assert worker.close() == 0
    got = answers(events)
    return [got[f"r{i}"] for i in range(len(prompts))], stats
