"""CUDA graphs, streams and synchronization: what only a device can show."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from xllm_attention import AttentionBackend, AttentionSpec, BackendLimits, create_backend
from xllm_attention.backends.triton_backend import TritonBackend
from xllm_metadata import LayerCache, StaticAttentionMetadata, build_attention_metadata

pytestmark = pytest.mark.gpu

BUCKET, PAGE_SIZE, MAX_LEN = 8, 16, 8192
NUM_PAGES = BUCKET * MAX_LEN // PAGE_SIZE
TABLES = [list(range(seq, NUM_PAGES, BUCKET)) for seq in range(BUCKET)]
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=128, scale=128**-0.5)
LIMITS = BackendLimits(
    device=torch.device("cuda"), dtype=torch.bfloat16, max_num_seqs=BUCKET, max_num_tokens=512, max_model_len=MAX_LEN
)
BACKENDS = ("triton", "flashinfer", "auto", "decode=triton,prefill=flashinfer")
LENGTHS = ([1], [8000, 5, 17, 4096, 1, 333, 64, 65], [2, 7999, 3], [], [16, 16, 16, 16, 15, 17, 1, 8191])


def _backend(name: str, caches: Sequence[LayerCache], specs: Sequence[AttentionSpec] = (SPEC,)) -> AttentionBackend:
    backend = create_backend(name, specs, LIMITS)
    backend.bind_kv_caches(caches)
    return backend


def _cache() -> LayerCache:
    """Random keys and values; every graph test reads them up to some length, and writes the last place."""
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (2, NUM_PAGES, PAGE_SIZE, SPEC.num_kv_heads, SPEC.head_dim)
    k, v = torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)
    return LayerCache(k=k, v=v)


def _qkv(num_rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    heads = torch.randn((num_rows, 8, SPEC.head_dim), generator=generator, device="cuda").to(torch.bfloat16)
    return heads[:, :4], heads[:, 4:6], heads[:, 6:]


def _decode(lens: list[int]) -> Any:
    return build_attention_metadata([1] * len(lens), lens, TABLES[: len(lens)], PAGE_SIZE, "cuda")


def _static() -> StaticAttentionMetadata:
    static = StaticAttentionMetadata(max_num_tokens=BUCKET, max_num_seqs=BUCKET, max_num_pages=NUM_PAGES, device="cuda")
    static.buffer("paged_kv_indices").fill_(NUM_PAGES)  # unusable
    return static


def _expected(cache: LayerCache, lens: list[int], seed: int) -> torch.Tensor:
    """The oracle's output for the live rows, over a copy of the cache."""
    copy = LayerCache(**{name: tensor.clone() for name, tensor in cache.items()})
    oracle = _backend("torch", [copy])
    oracle.plan(_decode(lens))
    q, k, v = _qkv(BUCKET, seed)
    out = torch.empty_like(q)
    oracle.run(q, k, v, out, 0)
    return out[: len(lens)]


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    error = (ours.double() - theirs.double()).norm(dim=-1) / theirs.double().norm(dim=-1)
    return bool((error.nan_to_num(torch.inf) <= 2e-2).all())  # twice bf16's limit: the oracle rounds too


@contextmanager
def _no_synchronization() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", BACKENDS)
def test_decode_does_not_synchronize(name: str, graph: bool) -> None:
    cache = _cache()
    backend = _backend(name, [cache])
    q, k, v = _qkv(BUCKET, 0)
    out = torch.empty_like(q)
    steps = [_decode(lens) for lens in LENGTHS[1::3]]
    for metadata in steps:  # the first time kernels are compiled and loaded
        backend.plan(metadata, graph=graph)
        backend.run(q, k, v, out, 0)
    torch.cuda.synchronize()
    with _no_synchronization():
        for metadata in steps:
            backend.plan(metadata, graph=graph)
            backend.run(q, k, v, out, 0)


@pytest.mark.parametrize("name", BACKENDS)
def test_prefill_does_not_synchronize(name: str) -> None:
    backend = _backend(name, [_cache()])
    q, k, v = _qkv(64, 0)
    out = torch.empty_like(q)
    steps = [
        build_attention_metadata([40, 24], [40, 24], TABLES[:2], PAGE_SIZE, "cuda"),
        build_attention_metadata([40, 24], [400, 24], TABLES[:2], PAGE_SIZE, "cuda"),
    ]
    for metadata in steps:
        backend.plan(metadata)
        backend.run(q, k, v, out, 0)
    torch.cuda.synchronize()
    with _no_synchronization():
        for metadata in steps:
            backend.plan(metadata)
            backend.run(q, k, v, out, 0)


@pytest.mark.parametrize("lens", [[8000, 5, 17], [333, 64, 65], [1]])
def test_padding_changes_no_bit(lens: list[int]) -> None:
    backend = _backend("triton", [_cache()])
    static = _static()
    q, k, v = _qkv(BUCKET, 3)
    outputs = []
    for size in (len(lens), BUCKET):
        static.fill(_decode(lens), num_tokens=size, num_seqs=size)
        backend.plan(static, graph=True)
        outputs.append(torch.full_like(q[:size], torch.nan))
        backend.run(q[:size], k[:size], v[:size], outputs[-1], 0)
    assert torch.equal(outputs[0], outputs[1][: len(lens)])
    assert not outputs[1][len(lens) :].any()


def _capture(backend: AttentionBackend, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Warms up, then captures what `run` launches after the current plan."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def test_nothing_is_compiled_during_a_capture() -> None:
    backend = _backend("triton", [_cache()])
    assert isinstance(backend, TritonBackend)
    backend.plan(_decode([1] * BUCKET), graph=True)
    q, k, v = _qkv(BUCKET, 3)
    out = torch.empty_like(q)
    backend.run(q, k, v, out, 0)
    compiled = set(backend._attend._launches)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        backend.run(q, k, v, out, 0)
    assert set(backend._attend._launches) == compiled


@pytest.mark.parametrize("name", BACKENDS)
def test_a_captured_run_follows_later_plans(name: str) -> None:
    """Captured at length 1, right at 8,000; the layout, and so the graph, is the same for all lengths."""
    cache, static = _cache(), _static()
    backend = _backend(name, [cache])
    static.fill(_decode([1]), num_tokens=BUCKET, num_seqs=BUCKET)
    backend.plan(static, graph=True)
    layout = backend.plan_layout
    q, k, v = _qkv(BUCKET, 3)
    out = torch.full_like(q, torch.nan)
    graph = _capture(backend, lambda: backend.run(q, k, v, out, 0))
    for lens in LENGTHS:
        expected = _expected(cache, lens, 3)
        static.fill(_decode(lens), num_tokens=BUCKET, num_seqs=BUCKET)
        backend.plan(static, graph=True)
        assert backend.plan_layout == layout
        out.fill_(torch.nan)
        graph.replay()
        assert _close(out[: len(lens)], expected)
        assert not out[len(lens) :].count_nonzero()


def _run_ahead(backend: AttentionBackend, cache: LayerCache) -> list[bool]:
    """Plans and replays steps while the device still sleeps before the first one; which of them came out right."""
    static = _static()
    static.fill(_decode([1]), num_tokens=BUCKET, num_seqs=BUCKET)
    backend.plan(static, graph=True)
    q, k, v = _qkv(BUCKET, 5)
    out = torch.empty_like(q)
    graph = _capture(backend, lambda: backend.run(q, k, v, out, 0))
    # The token of each step is after the positions that later steps read. The lengths differ in how sequences are
    # split, and so do the schedules that plans leave in host memory.
    steps = [_decode([length] * BUCKET) for length in (8000, 3000, 40)]
    expected = [_expected(cache, [length] * BUCKET, 5) for length in (8000, 3000, 40)]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second
    results = []
    for metadata in steps:
        backend.plan(metadata, graph=True)
        graph.replay()
        results.append(out.clone())
    torch.cuda.synchronize()
    return [_close(ours, theirs) for ours, theirs in zip(results, expected, strict=True)]


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_the_next_steps_may_be_planned_while_the_device_is_behind(name: str) -> None:
    cache = _cache()
    assert all(_run_ahead(_backend(name, [cache]), cache))


def test_without_guarded_buffers_planning_ahead_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above would show if FlashInfer's plans shared one pinned buffer."""
    from xllm_attention.backends.flashinfer_backend import pinned

    monkeypatch.setattr(pinned.PinnedRing, "take", lambda self: self._buffers[0])
    cache = _cache()
    assert not all(_run_ahead(_backend("flashinfer", [cache]), cache))


@pytest.mark.parametrize("name", BACKENDS)
def test_one_plan_a_group_a_step_over_28_layers(name: str) -> None:
    """Every fourth layer attends to everything, the others to a window."""
    sliding = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=128, scale=128**-0.5, sliding_window=100)
    kinds = [SPEC if layer_id % 4 == 3 else sliding for layer_id in range(28)]
    specs = [replace(spec, shared_cache=True) for spec in kinds]
    cache = _cache()
    backend = _backend(name, [cache] * 28, specs)
    full_layers = tuple(range(3, 28, 4))
    q, k, v = _qkv(BUCKET, 7)
    outs: list[torch.Tensor] = []
    for steps in range(1, 4):
        backend.plan(_decode([700] * BUCKET), graph=True)
        outs = [torch.empty_like(q) for _ in specs]
        for layer_id, out in enumerate(outs):
            backend.run(q, k, v, out, layer_id)
        assert backend.plan_counts == (steps, steps)
    for layer_id, out in enumerate(outs):
        assert torch.equal(out, outs[3 if layer_id in full_layers else 0])
    assert not torch.equal(outs[0], outs[3])


@pytest.mark.parametrize(
    ("dtype", "head_dim", "message"),
    [
        (torch.float32, 128, "'flashinfer' cannot serve layer 0: dtype torch.float32; served are"),
        (torch.bfloat16, 80, r"'flashinfer' cannot serve layer 0: head_dim 80; served are \[64, 128, 256\]"),
    ],
)
def test_flashinfer_refuses_before_the_first_step(dtype: torch.dtype, head_dim: int, message: str) -> None:
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=head_dim, scale=1.0)
    with pytest.raises(ValueError, match=message):
        create_backend("flashinfer", [spec], replace(LIMITS, dtype=dtype))


def test_flashinfer_refuses_caches_of_unequal_strides() -> None:
    cache = _cache()
    assert cache.k is not None
    assert cache.v is not None
    heads_first = cache.v.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="needs equal ones, and adjacent elements"):
        _backend("flashinfer", [LayerCache(k=cache.k, v=heads_first)])
