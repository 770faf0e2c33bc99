"""Loading a checkpoint for a native model, and digests that distinguish two checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from xllm_executor.native_state import checkpoint_digests, load_state
from xllm_models import load_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "vocab_size": 9,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    shapes = {"model.embed_tokens.weight": (9, 8), "model.norm.weight": (8,)}
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes |= {
            f"{layer}input_layernorm.weight": (8,),
            f"{layer}post_attention_layernorm.weight": (8,),
            f"{layer}self_attn.q_proj.weight": (8, 8),
            f"{layer}self_attn.k_proj.weight": (4, 8),
            f"{layer}self_attn.v_proj.weight": (4, 8),
            f"{layer}self_attn.o_proj.weight": (8, 8),
            f"{layer}mlp.gate_proj.weight": (12, 8),
            f"{layer}mlp.up_proj.weight": (12, 8),
            f"{layer}mlp.down_proj.weight": (8, 12),
        }
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
def test_tensors_are_the_models_own(checkpoint: Path, rank: int, size: int) -> None:
    state: dict[str, Any] = load_state(
        str(checkpoint), device="cpu", dtype="bfloat16", tp_rank=rank, tp_size=size, progress=False
    )
    model = load_model(checkpoint, dtype=torch.bfloat16, tp_rank=rank, tp_size=size)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(state["tensors"][name], parameter)
    assert state["tensors"]["lm_head.weight"].data_ptr() == state["tensors"]["model.embed_tokens.weight"].data_ptr()
    assert state["tensors"]["model.layers.1.self_attn.rotary_emb.cos_sin"].dtype is torch.float32
    assert state["args"] == model.config.to_model_args()
    layer = state["layers"][0]
    assert (len(state["layers"]), layer["num_heads"], layer["scale"]) == (2, 4 // size, 2**-0.5)


def test_digests_tell_which_tensor_differs(checkpoint: Path) -> None:
    before = checkpoint_digests(str(checkpoint))
    assert len(before) == 20
    assert checkpoint_digests(str(checkpoint)) == before
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    tensors["model.embed_tokens.weight"][8, 7] += 1
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(torch.bfloat16)
    save_file(tensors, checkpoint / "model.safetensors")
    after = checkpoint_digests(str(checkpoint))
    different = {name for name in before if before[name] != after[name]}
    assert different == {
        "model.norm.weight",
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
    }
