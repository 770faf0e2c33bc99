"""Window, soft cap and grouped heads against HF transformers' own masks and eager attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import MistralConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from xllm_attention import AttentionBackend, AttentionSpec
from xllm_metadata import build_attention_metadata

MakeBackend = Callable[..., AttentionBackend]
LENGTH = 20
TABLE = [9, 2, 7, 1, 4]  # page size 4


def _hf(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """The whole sequence at once, as a model of transformers computes it: [L, H, D]."""
    config = MistralConfig(sliding_window=spec.sliding_window or None, attn_implementation="eager", num_hidden_layers=1)
    make_mask = create_sliding_window_causal_mask if spec.sliding_window else create_causal_mask
    positions = torch.arange(LENGTH)[None]
    mask = make_mask(config, torch.zeros(1, LENGTH, 4), None, None, position_ids=positions)
    out, _ = eager_attention_forward(
        SimpleNamespace(num_key_value_groups=spec.group_size, training=False, head_dim=spec.head_dim),
        *(tensor.transpose(0, 1)[None] for tensor in (q, k, v)),
        mask,
        scaling=spec.scale,
        softcap=spec.logits_soft_cap or None,
    )
    assert isinstance(out, torch.Tensor)
    return out[0]


@pytest.mark.parametrize("cap", [0.0, 0.7])
@pytest.mark.parametrize("window", [0, 1, 2, 3, 4, 5, 19, 20, 21])
@pytest.mark.parametrize("chunks", [[20], [7, 13], [4, 1, 1, 1, 5, 8], [1] * 20], ids=str)
def test_equals_transformers(
    make_backend: MakeBackend, spec: AttentionSpec, cap: float, window: int, chunks: list[int]
) -> None:
    spec = replace(spec, sliding_window=window, logits_soft_cap=cap)
    backend = make_backend([spec])
    heads = torch.randn((LENGTH, 10, 8), generator=torch.Generator().manual_seed(window))
    q, k, v = heads[:, :6] * 2, heads[:, 6:8], heads[:, 8:]
    out = torch.empty_like(q)
    done = 0
    for n in chunks:
        backend.plan(build_attention_metadata([n], [done + n], [TABLE], 4))
        rows = slice(done, done + n)
        backend.run(q[rows], k[rows], v[rows], out[rows], 0)
        done += n
    torch.testing.assert_close(out, _hf(q, k, v, spec), rtol=1e-5, atol=2e-6)
