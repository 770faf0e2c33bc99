"""A toy model with two attention groups, and harnesses of it on every runtime."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from xllm_attention import (
    Attention,
    AttentionBackend,
    AttentionSpec,
    BackendLimits,
    LayerSpec,
    StateLayer,
    create_backend,
)
from xllm_graph import (
    DecodeGraphRunner,
    EagerRunner,
    GraphRuntime,
    ModelCalls,
    PiecewiseGraphRunner,
    RunnerSet,
    create_runtime,
    sequence_buckets,
    token_buckets,
)
from xllm_graph.conformance import Limits, ReplayHarness
from xllm_metadata import LayerCache, allocate_caches

SPECS = tuple(
    AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.35, sliding_window=window) for window in (0, 5)
)
LIMITS = Limits(max_num_seqs=11, max_num_tokens=24, max_model_len=26, page_size=4, num_pages=96, vocab_size=50)

GPU_ASKED_FOR = os.environ.get("XLLM_GPU_TESTS") == "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu run only where XLLM_GPU_TESTS=1 asks for them."""
    if not GPU_ASKED_FOR:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A GPU run without a GPU fails; it does not skip."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.fail("XLLM_GPU_TESTS=1 asks for the GPU tests, and torch finds no CUDA device")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class ToyModel(nn.Module):
    """Embedding, one attention layer for each spec, and a head. T tokens."""

    def __init__(self, specs: Sequence[AttentionSpec] = SPECS, vocab_size: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 32)
        self.qkv = nn.ModuleList(nn.Linear(32, 64) for _ in specs)
        self.o = nn.ModuleList(nn.Linear(32, 32) for _ in specs)
        self.attn = nn.ModuleList(Attention(spec, i) for i, spec in enumerate(specs))
        self.head = nn.Linear(32, vocab_size)
        self.register_buffer("frequencies", torch.arange(1, 33) / 32)

    @property
    def specs(self) -> list[LayerSpec]:
        """Of the layers with a cache, by layer_id."""
        layers = [module for module in self.modules() if isinstance(module, Attention | StateLayer)]
        return [layer.spec for layer in sorted(layers, key=lambda layer: layer.layer_id)]

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """tokens, positions [T] -> hidden [T, 32]."""
        hidden = self.embed(tokens) + torch.sin(positions[:, None] * self.frequencies)
        for qkv, o, attn in zip(self.qkv, self.o, self.attn, strict=True):
            q, k, v = qkv(hidden).split([32, 16, 16], dim=-1)
            hidden = hidden + torch.tanh(o(attn(q, k, v)))
        return hidden

    def compute_logits(self, hidden: torch.Tensor, indices: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [T, 32] -> [n, vocab]."""
        return self.head(hidden if indices is None else hidden.index_select(0, indices))


@pytest.fixture
def make_toy_model() -> Callable[[], ToyModel]:
    """Makes a toy model that `make_setup` takes."""
    return ToyModel


@dataclass(slots=True)
class Setup:
    """A harness with its model, backend, runtime and runners."""

    model: ToyModel
    backend: AttentionBackend
    runtime: GraphRuntime
    runners: RunnerSet
    decode: DecodeGraphRunner
    piecewise: PiecewiseGraphRunner
    calls: ModelCalls
    harness: ReplayHarness


MakeSetup = Callable[..., Setup]


def make_backend(
    device: str, specs: Sequence[LayerSpec], limits: Limits = LIMITS
) -> tuple[AttentionBackend, list[LayerCache]]:
    backend = create_backend(
        "torch",
        specs,
        BackendLimits(
            device=torch.device(device),
            dtype=torch.float32,
            max_num_seqs=sequence_buckets(limits.max_num_seqs)[-1],
            max_num_tokens=token_buckets(limits.max_num_tokens)[-1],
            max_model_len=limits.max_model_len,
        ),
    )
    needed = [spec.cache_specs(torch.float32) for spec in specs]
    with torch.inference_mode(False):  # ordinary tensors, as a host allocates them
        caches = allocate_caches(
            needed,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            num_slots=limits.num_slots,
            device=device,
        )
    backend.bind_kv_caches(caches)
    return backend, caches


@pytest.fixture(
    params=[
        pytest.param(("recorded", "cpu"), id="recorded"),
        pytest.param(("cuda", "cuda"), id="cuda", marks=pytest.mark.gpu),
    ]
)
def runtime_and_device(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(runtime, device)."""
    value: tuple[str, str] = request.param
    return value


@pytest.fixture
def make_setup(runtime_and_device: tuple[str, str]) -> MakeSetup:
    """Makes a setup; `warm=False` leaves the capture to the test, `model` replaces the toy model."""

    def make(
        *,
        warm: bool = True,
        model: ToyModel | None = None,
        cut_ops: Sequence[str] = (),
        cut_collectives: bool = False,
        logits_in_graph: bool = True,
        limits: Limits = LIMITS,
    ) -> Setup:
        runtime_name, device = runtime_and_device
        torch.manual_seed(0)
        model = (model or ToyModel()).to(device)
        specs = model.specs
        backend, caches = make_backend(device, specs, limits)
        reference_backend, reference_caches = make_backend(device, specs, limits)
        runtime = create_runtime(runtime_name, device)
        calls = ModelCalls(forward=model, compute_logits=model.compute_logits, backend=backend)
        decode = DecodeGraphRunner(
            calls,
            runtime,
            buckets=sequence_buckets(limits.max_num_seqs),
            logits_in_graph=logits_in_graph,
        )
        piecewise = PiecewiseGraphRunner(
            calls,
            runtime,
            buckets=token_buckets(limits.max_num_tokens),
            cut_ops=cut_ops,
            cut_collectives=cut_collectives,
        )
        eager = EagerRunner(calls)
        runners = RunnerSet(eager, [decode, piecewise], runtime=runtime)
        if warm:
            runners.warmup()
        reference = EagerRunner(replace(calls, backend=reference_backend))
        harness = ReplayHarness(
            runners.execute, runners, caches, reference.execute, reference_caches, limits=limits, device=device
        )
        return Setup(
            model=model, backend=backend, runtime=runtime, runners=runners, decode=decode, piecewise=piecewise,
            calls=calls, harness=harness,
        )  # fmt: skip

    return make
