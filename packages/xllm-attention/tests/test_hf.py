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
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention_forward

from xllm_attention import AttentionBackend, AttentionSpec
from xllm_metadata import build_attention_metadata

MakeBackend = Callable[..., AttentionBackend]
LENGTH = 20
TABLE = [9, 2, 7, 1, 4]  # page size 4


def _hf_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, sinks: torch.Tensor
) -> torch.Tensor:
    """The same by gpt-oss' attention."""
    config = MistralConfig(sliding_window=spec.sliding_window or None, attn_implementation="eager", num_hidden_layers=1)
    make_mask = create_sliding_window_causal_mask if spec.sliding_window else create_causal_mask
    mask = make_mask(config, torch.zeros(1, LENGTH, 4), None, None, position_ids=torch.arange(LENGTH)[None])
    out, _ = gpt_oss_attention_forward(
        SimpleNamespace(num_key_value_groups=spec.group_size, training=False, sinks=sinks),
        *(tensor.transpose(0, 1)[None] for tensor in (q, k, v)),
        mask,
        scaling=spec.scale,
    )
    return out[0]


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
    q, k, v = _heads(window)
    out = _in_chunks(make_backend([spec]), q, k, v, chunks)
    torch.testing.assert_close(out, _hf(q, k, v, spec), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("window", [0, 1, 3, 4, 19])
@pytest.mark.parametrize("chunks", [[20], [7, 13], [1] * 20], ids=str)
def test_sinks_equal_gpt_oss(make_backend: MakeBackend, spec: AttentionSpec, window: int, chunks: list[int]) -> None:
    spec = replace(spec, sliding_window=window, sinks=True)
    q, k, v = _heads(window)
    sinks = torch.linspace(-3, 5, spec.num_heads)
    out = _in_chunks(make_backend([spec]), q, k, v, chunks, sinks)
    torch.testing.assert_close(out, _hf_sinks(q, k, v, spec, sinks), rtol=1e-5, atol=2e-6)


def _heads(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = torch.randn((LENGTH, 10, 8), generator=torch.Generator().manual_seed(seed))
    return heads[:, :6] * 2, heads[:, 6:8], heads[:, 8:]


def _in_chunks(
    backend: AttentionBackend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    chunks: list[int],
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sequence in steps of these sizes."""
    out = torch.empty_like(q)
    done = 0
    for n in chunks:
        backend.plan(build_attention_metadata([n], [done + n], [TABLE], 4))
        rows = slice(done, done + n)
        backend.run(q[rows], k[rows], v[rows], out[rows], 0, sinks)
        done += n
    return out
