"""Random small configurations of every family, as arguments of its HF config class.

Heads, kv heads, head_dim, biases, tied head, windows, rope and the family's own fields vary; everything that
tensor parallelism cuts divides by 4. Imported by path (conftest).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

Config = dict[str, Any]


def _common(rng: Random, head_dims: tuple[int, ...] = (8, 12, 16, 20)) -> Config:
    heads = rng.choice((4, 8, 12))
    return {
        "vocab_size": rng.randrange(60, 131),
        "hidden_size": rng.choice((24, 32, 40, 48)),
        "intermediate_size": rng.choice((32, 48, 52)),
        "num_hidden_layers": rng.choice((2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in (1, 2, 4, heads) if heads % n == 0]),
        "head_dim": rng.choice(head_dims),
        "max_position_embeddings": 64,
        "rms_norm_eps": rng.choice((1e-6, 1e-5, 1e-3)),
        "tie_word_embeddings": rng.random() < 0.5,
    }


def _rope(rng: Random) -> Config:
    theta = rng.choice((500.0, 1e4, 1e6))
    kind = rng.choice(("default", "linear", "dynamic", "llama3", "yarn"))
    parameters: Config = {"rope_type": kind, "rope_theta": theta}
    if kind != "default":
        parameters["factor"] = rng.choice((2.0, 4.0, 8.0))
    if kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = 64 // int(parameters["factor"])
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice((2.0, 4.0))}
    if kind == "yarn":
        parameters |= rng.choice(({}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"attention_factor": 0.8}))
    return {"rope_parameters": parameters}


def _window(rng: Random) -> int:
    return rng.choice((3, 5, 9))


def _qwen_windows(rng: Random, num_layers: int) -> Config:
    if rng.random() < 0.4:
        return {}
    windows: Config = {"use_sliding_window": True, "sliding_window": _window(rng)}
    if rng.random() < 0.5:
        return windows | {"max_window_layers": rng.randrange(num_layers + 1)}
    kinds = ("sliding_attention", "full_attention")
    return windows | {"layer_types": [rng.choice(kinds) for _ in range(num_layers)]}


def llama(rng: Random) -> Config:
    config = _common(rng)
    config["hidden_size"] = config["num_attention_heads"] * rng.choice((4, 6))
    return config | _rope(rng) | {"attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}


def qwen2(rng: Random) -> Config:
    config = _common(rng)
    # Its config class knows no head_dim.
    del config["head_dim"]
    config["hidden_size"] = config["num_attention_heads"] * rng.choice((8, 12))
    return config | _rope(rng) | _qwen_windows(rng, config["num_hidden_layers"])


def qwen3(rng: Random) -> Config:
    config = _common(rng)
    windows = _qwen_windows(rng, config["num_hidden_layers"])
    return config | _rope(rng) | windows | {"attention_bias": rng.random() < 0.5}


def qwen3_moe(rng: Random) -> Config:
    config = _common(rng) | _rope(rng)
    num_experts = rng.choice((2, 5, 8))
    config |= {
        "attention_bias": rng.random() < 0.5,
        "num_experts": num_experts,
        "num_experts_per_tok": rng.randrange(1, min(num_experts, 4) + 1),
        "moe_intermediate_size": rng.choice((8, 12, 20)),
        "norm_topk_prob": rng.random() < 0.5,
        "decoder_sparse_step": rng.choice((1, 1, 2)),
        "mlp_only_layers": rng.choice(([], [], [1])),
    }
    if rng.random() < 0.5:
        config |= {"use_sliding_window": True, "sliding_window": _window(rng)}
    return config


def _linear_attention(rng: Random, num_layers: int) -> Config:
    key_heads = rng.choice((4, 8))
    kinds = ("linear_attention", "full_attention")
    return {
        "head_dim": rng.choice((8, 16, 32)),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": rng.choice((500.0, 1e6)),
            "partial_rotary_factor": rng.choice((0.25, 0.5, 1.0)),
        },
        "attention_bias": rng.random() < 0.5,
        "linear_conv_kernel_dim": rng.choice((2, 4, 4)),
        "linear_key_head_dim": rng.choice((8, 12)),
        "linear_value_head_dim": rng.choice((8, 10)),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * rng.choice((1, 2)),
        "layer_types": [rng.choice(kinds) for _ in range(num_layers - 1)] + ["full_attention"],
    }


def _shared_experts(rng: Random) -> Config:
    num_experts = rng.choice((2, 5, 8))
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": rng.randrange(1, min(num_experts, 4) + 1),
        "moe_intermediate_size": rng.choice((8, 12, 20)),
        "shared_expert_intermediate_size": rng.choice((8, 16)),
    }


def qwen3_next(rng: Random) -> Config:
    config = _common(rng)
    config |= _linear_attention(rng, config["num_hidden_layers"]) | _shared_experts(rng)
    return config | {
        "norm_topk_prob": rng.random() < 0.5,
        "decoder_sparse_step": rng.choice((1, 1, 2)),
        "mlp_only_layers": rng.choice(([], [], [1])),
    }


def qwen3_5_text(rng: Random) -> Config:
    config = _common(rng)
    return config | _linear_attention(rng, config["num_hidden_layers"])


def qwen3_5_moe_text(rng: Random) -> Config:
    config = _common(rng)
    del config["intermediate_size"]
    return config | _linear_attention(rng, config["num_hidden_layers"]) | _shared_experts(rng)


def mistral(rng: Random) -> Config:
    return _common(rng) | _rope(rng) | {"sliding_window": rng.choice((None, _window(rng)))}


def mixtral(rng: Random) -> Config:
    num_experts = rng.choice((2, 5, 8))
    return (
        _common(rng)
        | _rope(rng)
        | {
            "num_local_experts": num_experts,
            "num_experts_per_tok": rng.randrange(1, min(num_experts, 4) + 1),
            "sliding_window": rng.choice((None, _window(rng))),
        }
    )


def olmo2(rng: Random) -> Config:
    config = _common(rng)
    # Its config class knows no head_dim.
    del config["head_dim"]
    config["hidden_size"] = config["num_attention_heads"] * rng.choice((8, 12))
    return config | _rope(rng) | {"attention_bias": rng.random() < 0.5}


def glm4(rng: Random) -> Config:
    rope = _rope(rng)
    rope["rope_parameters"]["partial_rotary_factor"] = rng.choice((0.5, 0.5, 1.0))
    special = {"pad_token_id": None, "eos_token_id": None}
    return _common(rng, head_dims=(8, 16, 24)) | rope | special | {"attention_bias": rng.random() < 0.5}


def glm4_moe(rng: Random) -> Config:
    num_groups = rng.choice((1, 2, 4))
    num_experts = num_groups * rng.choice((2, 3, 4))
    top_groups = rng.randrange(1, num_groups + 1)
    most = top_groups * num_experts // num_groups
    rope = _rope(rng)
    rope["rope_parameters"]["partial_rotary_factor"] = rng.choice((0.5, 0.5, 1.0))
    return (
        _common(rng, head_dims=(8, 16, 24))
        | rope
        | {
            "attention_bias": rng.random() < 0.5,
            "use_qk_norm": rng.random() < 0.5,
            "n_routed_experts": num_experts,
            "num_experts_per_tok": rng.randrange(1, min(most, 4) + 1),
            "moe_intermediate_size": rng.choice((8, 12, 20)),
            "norm_topk_prob": rng.random() < 0.5,
            "n_shared_experts": rng.choice((1, 2)),
            "first_k_dense_replace": rng.choice((0, 1, 1, 2)),
            "routed_scaling_factor": rng.choice((1.0, 1.7)),
            "n_group": num_groups,
            "topk_group": top_groups,
        }
    )


def _groups(rng: Random) -> Config:
    num_groups = rng.choice((1, 2, 4))
    num_experts = num_groups * rng.choice((2, 3, 4))
    top_groups = rng.randrange(1, num_groups + 1)
    most = top_groups * num_experts // num_groups
    return {
        "n_routed_experts": num_experts,
        "num_experts_per_tok": rng.randrange(1, min(most, 4) + 1),
        "n_group": num_groups,
        "topk_group": top_groups,
        "moe_intermediate_size": rng.choice((8, 12, 20)),
        "n_shared_experts": rng.choice((1, 2)),
        "first_k_dense_replace": rng.choice((0, 1, 1, 2)),
        "routed_scaling_factor": rng.choice((1.0, 1.7)),
    }


def _latent(rng: Random) -> Config:
    config = _common(rng) | _rope(rng) | _groups(rng)
    del config["head_dim"]
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["hidden_size"] = config["num_attention_heads"] * rng.choice((4, 6))
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"] |= rng.choice(({}, {"mscale": 1.0, "mscale_all_dim": 0.7}, {"mscale_all_dim": 1.0}))
    return config | {
        "attention_bias": rng.random() < 0.5,
        "q_lora_rank": rng.choice((None, 12, 20)),
        "kv_lora_rank": rng.choice((8, 16, 24)),
        "qk_nope_head_dim": rng.choice((8, 12)),
        "qk_rope_head_dim": rng.choice((8, 12)),
        "v_head_dim": rng.choice((8, 12, 20)),
    }


def deepseek_v2(rng: Random) -> Config:
    method = rng.choice(("greedy", "group_limited_greedy"))
    return _latent(rng) | {"topk_method": method, "mlp_bias": rng.random() < 0.5}


def deepseek_v3(rng: Random) -> Config:
    return _latent(rng) | {"rope_interleave": rng.random() < 0.7, "norm_topk_prob": rng.random() < 0.5}


def gemma3_text(rng: Random) -> Config:
    config = _common(rng)
    config["num_hidden_layers"] = 3
    config["hidden_size"] = config["num_attention_heads"] * rng.choice((4, 6))
    full: Config = {"rope_type": "default", "rope_theta": rng.choice((1e4, 1e6))}
    if rng.random() < 0.5:
        full |= {"rope_type": "linear", "factor": rng.choice((2.0, 8.0))}
    kinds = ("sliding_attention", "full_attention")
    return config | {
        "attention_bias": rng.random() < 0.5,
        "query_pre_attn_scalar": rng.choice((8, 24)),
        "sliding_window": _window(rng),
        "layer_types": [rng.choice(kinds) for _ in range(3)],
        "final_logit_softcapping": rng.choice((None, 4.0)),
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": rng.choice((500.0, 1e4))},
        },
    }


def gpt_oss(rng: Random) -> Config:
    config = _common(rng) | _rope(rng)
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = rng.random() < 0.5
    num_experts = rng.choice((2, 5, 8))
    config |= {
        "attention_bias": rng.random() < 0.7,
        "sliding_window": _window(rng),
        "num_local_experts": num_experts,
        "num_experts_per_tok": rng.randrange(1, min(num_experts, 4) + 1),
        "swiglu_alpha": rng.choice((1.702, 0.9)),
        "swiglu_limit": rng.choice((7.0, 0.5)),
    }
    if rng.random() < 0.5:
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [rng.choice(kinds) for _ in range(config["num_hidden_layers"])]
    return config


def phi3(rng: Random) -> Config:
    config = _common(rng)
    # Its config class knows no head_dim.
    del config["head_dim"]
    head_dim = rng.choice((8, 16))
    config["hidden_size"] = config["num_attention_heads"] * head_dim
    partial = rng.choice((1.0, 0.75, 0.5))
    parameters: Config = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": partial}
    trained = rng.choice((8, 32))  # shorter, or longer, than every text of the tests
    if rng.random() < 0.7:
        count = int(head_dim * partial) // 2
        factors = {name: [1.0 + rng.random() * 4 for _ in range(count)] for name in ("short_factor", "long_factor")}
        parameters |= {"rope_type": "longrope"} | factors
    own = {"original_max_position_embeddings": trained, "sliding_window": rng.choice((None, _window(rng)))}
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    return config | own | special | {"rope_parameters": parameters}


FAMILIES: dict[str, Callable[[Random], Config]] = {
    draw.__name__: draw
    for draw in (
        *(llama, qwen2, qwen3, qwen3_moe, mistral, mixtral, olmo2, glm4, glm4_moe, gemma3_text, phi3),
        *(qwen3_next, qwen3_5_text, qwen3_5_moe_text, gpt_oss, deepseek_v2, deepseek_v3),
    )
}


def draw(family: str, number: int) -> Config:
    """The family's configuration `number`, always the same."""
    return FAMILIES[family](Random(f"{family} {number}"))
