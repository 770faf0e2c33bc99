"""The README's example runs, on a small checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file

from xllm_models import CausalLM

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def test_the_example_runs(tmp_path: Path) -> None:
    shapes = {
        "self_attn.q_proj": (16, 16), "self_attn.k_proj": (16, 16), "self_attn.v_proj": (16, 16),
        "self_attn.o_proj": (16, 16), "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16), "mlp.down_proj": (16, 24),
        "input_layernorm": (16,), "post_attention_layernorm": (16,),
    }  # fmt: skip
    tensors = {f"model.layers.0.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    tensors |= {"model.embed_tokens.weight": torch.randn(20, 16), "model.norm.weight": torch.ones(16)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    namespace: dict[str, object] = {"checkpoint": tmp_path}
    exec(example, namespace)
    assert isinstance(namespace["model"], CausalLM)
    logits = namespace["logits"]
    assert isinstance(logits, torch.Tensor)
    assert logits.shape == (1, 20)
    assert torch.isfinite(logits).all()
