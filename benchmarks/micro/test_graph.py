"""The host's share of a step under graphs: filling, planning and walking the pieces, with graphs that do nothing.

python -m pytest benchmarks/micro --benchmark-only
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from xllm_attention import Attention, AttentionBackend, AttentionSpec, BackendCapabilities, BackendLimits, Phase
from xllm_graph import DecodeGraphRunner, ModelCalls, PiecewiseGraphRunner
from xllm_metadata import AttentionMetadata, LayerCache, StaticAttentionMetadata, build_attention_metadata

NUM_LAYERS = 28
SPEC = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0)


class NoGraph:
    def replay(self) -> None:
        pass


class NoRuntime:
    """Captures nothing, replays nothing."""

    name = "none"
    device = torch.device("cpu")

    @contextmanager
    def session(self) -> Iterator[None]:
        with torch.no_grad():
            yield

    def begin(self) -> None:
        pass

    def end(self) -> NoGraph:
        return NoGraph()

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def memory_bytes(self) -> int:
        return 0

    def release(self) -> None:
        pass


class NoAttention(AttentionBackend):
    """Plans and attends to nothing."""

    name = "none"
    capabilities = BackendCapabilities(full_graph_phases=frozenset({Phase.DECODE}))

    def _bind(self, caches: Any, page_size: int) -> None:
        pass

    def _plan_step(self, step: Any) -> None:
        pass

    def _plan_group(self, step: Any, group: int) -> None:
        pass

    def _run(self, q: Any, k: Any, v: Any, out: Any, layer_id: int, sinks: Any) -> None:
        pass


class Layers(torch.nn.Module):
    """Attention layers with one addition before each, so that every piece has work."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Attention(SPEC, i) for i in range(NUM_LAYERS))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = tokens[:, None].float().expand(-1, 16)
        for layer in self.layers:
            hidden = layer(hidden + 1, hidden[:, :8].contiguous(), hidden[:, :8].contiguous())
        return hidden


def compute_logits(hidden: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
    return hidden if indices is None else hidden.index_select(0, indices)


@pytest.fixture
def backend() -> AttentionBackend:
    limits = BackendLimits(
        device=torch.device("cpu"), dtype=torch.float32, max_num_seqs=128, max_num_tokens=128, max_model_len=2048
    )
    backend = NoAttention([SPEC] * NUM_LAYERS, limits)
    caches = torch.zeros(NUM_LAYERS, 2, 1, 16, 1, 8)
    backend.bind_kv_caches([LayerCache(k=k, v=v) for k, v in caches])
    return backend


def calls(backend: AttentionBackend) -> ModelCalls:
    return ModelCalls(forward=Layers(), compute_logits=compute_logits, backend=backend)


def decode(num_seqs: int) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor]:
    metadata = build_attention_metadata([1] * num_seqs, [1100] * num_seqs, [[0] * 69] * num_seqs, 16)
    tokens = torch.zeros(num_seqs, dtype=torch.int32)
    return tokens, tokens, metadata, torch.arange(num_seqs)


@pytest.mark.parametrize(("live", "padded"), [(1, 1), (16, 16), (100, 112)])
def test_fill(benchmark: Any, live: int, padded: int) -> None:
    static = StaticAttentionMetadata(max_num_tokens=128, max_num_seqs=128, max_num_pages=128 * 128, device="cpu")
    _, _, metadata, _ = decode(live)
    benchmark(lambda: static.fill(metadata, num_tokens=padded, num_seqs=padded))


@pytest.mark.parametrize("num_seqs", [1, 100])
def test_a_decode_step(benchmark: Any, backend: AttentionBackend, num_seqs: int) -> None:
    runner = DecodeGraphRunner(calls(backend), NoRuntime(), buckets=(1, 112))
    runner.warmup()
    step = decode(num_seqs)
    benchmark(lambda: runner.execute(*step))


def test_a_piecewise_step_of_28_layers(benchmark: Any, backend: AttentionBackend) -> None:
    """57 calls: a graph before, between and after 28 attention layers."""
    runner = PiecewiseGraphRunner(calls(backend), NoRuntime(), buckets=(1, 128))
    runner.warmup()
    step = decode(100)
    benchmark(lambda: runner.execute(*step))
