"""Models of the benchmarks: real shapes with random weights, whole or as the shard of one tensor-parallel rank."""

from __future__ import annotations

from typing import Any

import torch

from xllm_models import CausalLM, TensorParallel, get_model_class
from xllm_models.layers.parallel import ShardedModule

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
    },
    # Qwen3-Next-80B-A3B with 12 of its 48 layers.
    "qwen3-next": {
        "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
        "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1,
    },
    # DeepSeek-V3 with 4 of its 61 layers, the first of them dense.
    "deepseek-v3": {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "num_hidden_layers": 4, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False,
        "first_k_dense_replace": 1, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    "small": {
        "model_type": "qwen3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    },
}  # fmt: skip
# Standard deviation of the weights. The small model has large weights and an untied head, so that its output depends on
# the whole input.
_STD = {"small": 0.2}


def random_model(shape: str, device: torch.device, dtype: torch.dtype, tp: TensorParallel | None = None) -> CausalLM:
    """The model with random weights; the ranks of `tp` hold shards of the model that a single rank has."""
    model = get_model_class(SHAPES[shape]["model_type"])(SHAPES[shape], device=device, dtype=dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=_STD.get(shape, 0.02))
    model.weights_loaded = True
    return model if tp is None or tp.size == 1 else _share(model, tp)


@torch.no_grad()
def _share(whole: CausalLM, tp: TensorParallel) -> CausalLM:
    """One rank's shard of a whole model, as loading its checkpoint would give."""
    share = type(whole)(whole.config, device=whole.device, dtype=whole.dtype, tp=tp)
    for name, module in share.named_modules():
        owner = whole.get_submodule(name)
        for key, parameter in module.named_parameters(recurse=False):
            values = owner.get_parameter(key)
            if not isinstance(module, ShardedModule):
                parameter.copy_(values)
                continue
            assert isinstance(owner, ShardedModule)
            parameter.zero_()  # rows that pad the vocabulary
            for mine, complete in zip(module.weight_shards(key), owner.weight_shards(key), strict=True):
                parameter[mine.target] = values[complete.target][mine.source]
    share.weights_loaded = True
    return share
