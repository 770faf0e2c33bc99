"""The layer and its op: layouts, registration, compilation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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


@pytest.fixture
def with_sinks(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, sinks=True)


@pytest.fixture
def planned_with_sinks(make_backend: MakeBackend, with_sinks: AttentionSpec) -> AttentionBackend:
    backend = make_backend([with_sinks, with_sinks])
    backend.plan(build_attention_metadata([3, 2], [3, 2], [[0], [1]], 4))
    return backend


def test_opcheck_with_sinks(planned_with_sinks: AttentionBackend) -> None:
    q, k, v = _qkv(5)
    args = (q.unflatten(1, (H, D)), k.unflatten(1, (K, D)), v.unflatten(1, (K, D)), torch.zeros(5, H, D), 0)
    with forward_context(planned_with_sinks):
        results = torch.library.opcheck(torch.ops.xllm.attention.default, (*args, torch.randn(H)))
    assert set(results.values()) == {"SUCCESS"}


def test_sinks_reach_the_backend_eager_and_compiled(
    planned_with_sinks: AttentionBackend, with_sinks: AttentionSpec
) -> None:
    q, k, v = _qkv(5)
    layer = Attention(with_sinks, 1)
    with forward_context(planned_with_sinks), torch.inference_mode():
        none = layer(q, k, v, torch.full((H,), -torch.inf))
        eager = layer(q, k, v, torch.arange(H, dtype=torch.float32))
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        assert torch.equal(compiled(q, k, v, torch.arange(H, dtype=torch.float32)), eager)
    # Token 0 sees one key of score s: its output is v * exp(s) / (exp(s) + exp(sink)).
    score = (q[0].view(H, D) * k[0].view(K, 1, D).expand(K, H // K, D).reshape(H, D)).sum(1) * with_sinks.scale
    weight = torch.sigmoid(score - torch.arange(H))
    torch.testing.assert_close(eager[0].view(H, D), none[0].view(H, D) * weight[:, None])


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (None, r"sinks of layer 1 is None; its spec has sinks, so it must be a tensor \[6\]"),
        (torch.zeros(2), r"sinks of layer 1 has shape \[2\]; it must be \[6\], one per head"),
        (torch.zeros(1, 6), r"sinks of layer 1 has shape \[1, 6\]; it must be \[6\]"),
        (
            torch.zeros(6, dtype=torch.float64),
            "sinks of layer 1 is torch.float64 on cpu; it must be as q, torch.float32",
        ),
        (torch.zeros(6, device="meta"), "sinks of layer 1 is torch.float32 on meta; it must be as q, torch.float32 on"),
        (torch.zeros(12)[::2], r"sinks of layer 1 has strides \(2,\); it must be contiguous"),
    ],
)
def test_sinks_that_do_not_fit(
    planned_with_sinks: AttentionBackend, with_sinks: AttentionSpec, sinks: torch.Tensor | None, message: str
) -> None:
    with forward_context(planned_with_sinks), pytest.raises(ValueError, match=message):
        Attention(with_sinks, 1)(*_qkv(5), sinks)


@pytest.fixture
def latent(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, latent=True, v_head_dim=5)


def test_a_latent_layer_takes_its_values_from_the_keys(
    make_backend: MakeBackend, spec: AttentionSpec, latent: AttentionSpec
) -> None:
    metadata = build_attention_metadata([3, 2], [3, 2], [[0], [1]], 4)
    backend, expanded = make_backend([latent, latent]), make_backend([replace(spec, v_head_dim=5)])
    backend.plan(metadata)
    expanded.plan(metadata)
    q, k, _ = _qkv(5)
    v = k.unflatten(1, (K, D))[..., :5]
    with forward_context(expanded), torch.inference_mode():
        wanted = Attention(replace(spec, v_head_dim=5), 0)(q, k, v)
    layer = Attention(latent, 1)
    with forward_context(backend), torch.inference_mode():
        flat = layer(q, k, None)
        split = layer(q.unflatten(1, (H, D)), k.unflatten(1, (K, D)), None)
        compiled = torch.compile(layer, fullgraph=True, backend="eager")(q, k, None)
    assert wanted.shape == flat.shape == (5, H * 5)
    assert split.shape == (5, H, 5)
    assert torch.equal(flat, wanted)
    assert torch.equal(flat, split.flatten(1))
    assert torch.equal(flat, compiled)


def test_opcheck_of_a_latent_layer(make_backend: MakeBackend, latent: AttentionSpec) -> None:
    backend = make_backend([latent])
    backend.plan(build_attention_metadata([3, 2], [3, 2], [[0], [1]], 4))
    q, k, _ = _qkv(5)
    k = k.unflatten(1, (K, D))
    args = (q.unflatten(1, (H, D)), k, k[..., :5], torch.zeros(5, H, 5), 0)
    with forward_context(backend):
        results = torch.library.opcheck(torch.ops.xllm.attention.default, args)
    assert set(results.values()) == {"SUCCESS"}


def test_values_against_the_spec(planned: AttentionBackend, spec: AttentionSpec, latent: AttentionSpec) -> None:
    q, k, v = _qkv(5)
    with forward_context(planned):
        with pytest.raises(ValueError, match="v of layer 0 must be None: its spec is latent, values are part of k"):
            Attention(latent, 0)(q, k, v)
        with pytest.raises(ValueError, match="v of layer 0 is None; only latent layers have values"):
            Attention(spec, 0)(q, k, None)


def test_sinks_for_a_layer_without(planned: AttentionBackend, spec: AttentionSpec) -> None:
    message = r"sinks of layer 0 has shape \[6\]; its spec has no sinks, so it must be None"
    with forward_context(planned), pytest.raises(ValueError, match=message):
        Attention(spec, 0)(*_qkv(5), torch.zeros(6))


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
