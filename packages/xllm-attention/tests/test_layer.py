"""The layer and its op: layouts, registration, compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from xllm_attention import Attention, AttentionBackend, AttentionSpec, forward_context
from xllm_metadata import build_attention_metadata

MakeBackend = Callable[..., AttentionBackend]
H, K, D = 6, 2, 8


def _qkv(num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of a fused projection: [T, H * D], [T, K * D], [T, K * D]."""
    fused = torch.randn((num_rows, (H + 2 * K) * D), generator=torch.Generator().manual_seed(0))
    q, k, v = fused.tensor_split((H * D, (H + K) * D), dim=1)
    return q, k, v


@pytest.fixture
def planned(make_backend: MakeBackend, spec: AttentionSpec) -> AttentionBackend:
    """Two layers, a planned prefill of 3 and 2 tokens."""
    backend = make_backend([spec, spec])
    backend.plan(build_attention_metadata([3, 2], [3, 2], [[0], [1]], 4))
    return backend


def test_flat_and_split_heads_agree(planned: AttentionBackend, spec: AttentionSpec) -> None:
    layer = Attention(spec, 1)
    q, k, v = _qkv(5)
    with forward_context(planned):
        flat = layer(q, k, v)
        split = layer(q.unflatten(1, (H, D)), k.unflatten(1, (K, D)), v.unflatten(1, (K, D)))
    assert flat.shape == (5, H * D)
    assert flat.is_contiguous()
    assert split.shape == (5, H, D)
    assert torch.equal(flat, split.flatten(1))


def test_output_is_contiguous_for_transposed_queries(planned: AttentionBackend, spec: AttentionSpec) -> None:
    q, k, v = _qkv(5)
    transposed = q.t().contiguous().t()
    with forward_context(planned):
        layer = Attention(spec, 0)
        out = layer(transposed, k, v)
        assert out.is_contiguous()
        torch.testing.assert_close(out, layer(q, k, v))


def test_no_token(planned: AttentionBackend, spec: AttentionSpec) -> None:
    planned.plan(build_attention_metadata([], [], [], 4))
    with forward_context(planned):
        assert Attention(spec, 0)(*_qkv(0)).shape == (0, H * D)


def test_op_outside_of_a_context(spec: AttentionSpec) -> None:
    with pytest.raises(RuntimeError, match="outside of a forward context"):
        Attention(spec, 0)(*_qkv(2))


def test_op_is_a_cut_point() -> None:
    assert torch.Tag.cudagraph_unsafe in torch.ops.xllm.attention.default.tags


def test_opcheck(planned: AttentionBackend) -> None:
    q, k, v = _qkv(5)
    args = (q.unflatten(1, (H, D)), k.unflatten(1, (K, D)), v.unflatten(1, (K, D)), torch.zeros(5, H, D), 0)
    with forward_context(planned):
        results = torch.library.opcheck(torch.ops.xllm.attention.default, args)
    assert set(results.values()) == {"SUCCESS"}


class _TwoLayers(nn.Module):
    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(spec, layer_id) for layer_id in range(2))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            q = layer(q, k, v) + 1
        return q


def test_compiles_to_one_node_a_layer(planned: AttentionBackend, spec: AttentionSpec) -> None:
    nodes: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        nodes.extend(str(node.target) for node in graph.graph.nodes if "xllm" in str(node.target))
        return graph.forward

    model = _TwoLayers(spec)
    args = _qkv(5)
    with forward_context(planned), torch.inference_mode():
        eager = model(*args)
        assert torch.equal(torch.compile(model, fullgraph=True, backend=backend)(*args), eager)
        assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(*args), eager)
    assert len(nodes) == 2


def test_print_shows_the_layer(spec: AttentionSpec) -> None:
    assert "layer_id=3, AttentionSpec(num_heads=6" in repr(Attention(spec, 3))
