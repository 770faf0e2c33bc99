"""What is particular to the torch backend: its two decode paths, its fixed shapes, no device reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from xllm_attention import AttentionBackend, AttentionSpec
from xllm_metadata import LayerCache, StaticAttentionMetadata, build_attention_metadata

MakeBackend = Callable[..., AttentionBackend]
MakeCaches = Callable[..., list[LayerCache]]
BUCKET = 8
TABLES = [[3 * i + j for j in range(3)] for i in range(BUCKET)]  # page size 4


class _Ops(TorchDispatchMode):
    """Records each op with the shapes and addresses of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[str, tuple[Any, ...]]] = []
        self.ops: set[torch._ops.OpOverload] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = tuple(tuple(arg.shape) if isinstance(arg, torch.Tensor) else repr(arg) for arg in args[:1])
        self.shapes.append((str(func), shapes))
        self.ops.add(func)
        return func(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    """Records the tensors whose values Python reads."""

    NAMES = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self.NAMES:
            self.addresses.add(args[0].data_ptr())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def static() -> StaticAttentionMetadata:
    return StaticAttentionMetadata(max_num_tokens=BUCKET, max_num_seqs=BUCKET, max_num_pages=3 * BUCKET, device="cpu")


@pytest.fixture
def specs(spec: AttentionSpec) -> list[AttentionSpec]:
    other = [replace(spec, v_head_dim=11), replace(spec, latent=True, v_head_dim=5)]
    return [spec, replace(spec, sliding_window=5), replace(spec, logits_soft_cap=0.5), *other]


def _inputs(num_rows: int, spec: AttentionSpec, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    qk = torch.randn((num_rows, spec.num_heads + spec.num_kv_heads, spec.head_dim), generator=generator)
    v = torch.randn((num_rows, spec.num_kv_heads, spec.value_head_dim), generator=generator)
    k = qk[:, spec.num_heads :]
    return qk[:, : spec.num_heads], k, k[..., : spec.value_head_dim] if spec.latent else v


def _out(q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    return q.new_full((*q.shape[:2], spec.value_head_dim), torch.nan)


def _run(backend: AttentionBackend, num_rows: int, seed: int = 0) -> list[torch.Tensor]:
    outs = []
    for layer_id, spec in enumerate(backend.specs):
        q, k, v = _inputs(num_rows, spec, seed + layer_id)
        outs.append(_out(q, spec))
        backend.run(q, k, v, outs[-1], layer_id)
    return outs


def _decode(lens: list[int]) -> Any:
    return build_attention_metadata([1] * len(lens), lens, TABLES[: len(lens)], 4)


def test_dense_and_ragged_decode_agree(
    make_backend: MakeBackend,
    make_caches: MakeCaches,
    specs: list[AttentionSpec],
    static: StaticAttentionMetadata,
) -> None:
    dense, ragged = make_backend(specs), make_backend(specs)
    caches = [make_caches(specs), make_caches(specs)]
    for both in zip(*caches, strict=True):
        for (_, ours), (_, theirs) in zip(both[0].items(), both[1].items(), strict=True):
            theirs.copy_(ours.normal_())
    dense.bind_kv_caches(caches[0])
    ragged.bind_kv_caches(caches[1])
    for seed, lens in enumerate([[1, 12, 4, 5, 8, 9, 3, 2], [7, 1, 12], [11], []]):
        metadata = _decode(lens)
        static.fill(metadata, num_tokens=BUCKET, num_seqs=BUCKET)
        dense.plan(static, graph=True)
        ragged.plan(metadata)
        for ours, theirs in zip(_run(dense, BUCKET, seed), _run(ragged, BUCKET, seed), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(caches[0], caches[1], strict=True):
            assert ours.k is not None
            assert theirs.k is not None
            assert torch.equal(ours.k, theirs.k)


def test_graph_run_is_the_same_ops_for_every_length(
    make_backend: MakeBackend, specs: list[AttentionSpec], static: StaticAttentionMetadata
) -> None:
    """Whatever the live rows and lengths: same ops on the same shapes, none of them data-dependent."""
    backend = make_backend(specs)
    seen = []
    for lens in ([1], [12] * 8, [3, 12, 1], []):
        static.fill(_decode(lens), num_tokens=BUCKET, num_seqs=BUCKET)
        backend.plan(static, graph=True)
        with _Ops() as recorded:
            _run(backend, BUCKET)
        seen.append(recorded.shapes)
        forbidden = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        assert not [op for op in recorded.ops if forbidden & set(op.tags)]
    assert all(shapes == seen[0] for shapes in seen)


@pytest.mark.parametrize("graph", [False, True])
def test_a_latent_layer_appends_once(make_backend: MakeBackend, spec: AttentionSpec, graph: bool) -> None:
    latent = replace(spec, latent=True, v_head_dim=5)
    backend = make_backend([latent])
    backend.plan(_decode([3, 2]), graph=graph)
    q, k, _ = _inputs(2, latent, 0)
    with _Ops() as recorded:
        backend.run(q, k, k[..., :5], q.new_empty(2, latent.num_heads, 5), 0)
    assert [op for op, _ in recorded.shapes].count("aten.index_put_.default") == 1
    assert [op for op, _ in recorded.shapes].count("aten.index_put.default") == 0


class _Recorder(TorchDispatchMode):
    """Keeps the ops of a run with their arguments and results, so that they can be run again on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            if isinstance(result, torch.Tensor) and again.data_ptr() != result.data_ptr():
                result.copy_(again)


def test_recorded_run_follows_later_plans(
    make_backend: MakeBackend,
    make_caches: MakeCaches,
    specs: list[AttentionSpec],
    static: StaticAttentionMetadata,
) -> None:
    """What was recorded at length 1 is right at other lengths, once the step is planned: buffers refill in place."""
    backend, eager = make_backend(specs), make_backend(specs)
    caches = make_caches(specs)
    backend.bind_kv_caches(caches)
    eager.bind_kv_caches(caches)
    static.fill(_decode([1]), num_tokens=BUCKET, num_seqs=BUCKET)
    backend.plan(static, graph=True)
    inputs = [_inputs(BUCKET, spec, layer) for layer, spec in enumerate(specs)]
    outs = [_out(q, spec) for (q, _, _), spec in zip(inputs, specs, strict=True)]
    with _Recorder() as recorder:
        for layer, (q, k, v) in enumerate(inputs):
            backend.run(q, k, v, outs[layer], layer)
    for lens in ([1, 12, 4, 5, 8, 9, 3, 2], [2, 3, 7], [], [12]):
        static.fill(_decode(lens), num_tokens=BUCKET, num_seqs=BUCKET)
        backend.plan(static, graph=True)
        recorder.replay()
        eager.plan(_decode(lens))
        for layer, (q, k, v) in enumerate(inputs):
            out = _out(q, specs[layer])
            eager.run(q, k, v, out, layer)
            torch.testing.assert_close(outs[layer], out, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("q_lens", [[1, 1, 1], [3, 1, 2]])
def test_no_device_value_is_read(
    make_backend: MakeBackend, specs: list[AttentionSpec], q_lens: list[int], graph: bool
) -> None:
    """Python reads host mirrors only; no op makes a scalar or a shape out of tensor values."""
    if graph and q_lens != [1, 1, 1]:
        q_lens = [1, 1]
    metadata = build_attention_metadata(q_lens, [5, 9, 2][: len(q_lens)], TABLES[: len(q_lens)], 4)
    host = {
        tensor.data_ptr()
        for tensor in (
            metadata.kv_seq_lens_host,
            metadata.paged_kv_indptr_host,
            metadata.paged_kv_last_page_len_host,
            metadata.qo_indptr_host,
        )
        if tensor is not None
    }
    # On a CPU the builder's device tensors may be the host tensors themselves.
    metadata = replace(
        metadata,
        slot_mapping=metadata.slot_mapping.clone(),
        paged_kv_indptr=metadata.paged_kv_indptr.clone(),
        paged_kv_indices=metadata.paged_kv_indices.clone(),
        paged_kv_last_page_len=metadata.paged_kv_last_page_len.clone(),
        kv_cu_seq_lens=metadata.kv_cu_seq_lens.clone(),
        qo_indptr=None if metadata.qo_indptr is None else metadata.qo_indptr.clone(),
    )
    backend = make_backend(specs)
    with _Reads() as reads, _Ops() as recorded:
        backend.plan(metadata, graph=graph)
        _run(backend, sum(q_lens))
    assert reads.addresses <= host
    forbidden = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    assert not [op for op in recorded.ops if forbidden & set(op.tags)]


def test_graph_buffers_made_in_inference_mode_serve_outside(
    make_backend: MakeBackend, specs: list[AttentionSpec]
) -> None:
    backend = make_backend(specs)
    with torch.inference_mode():
        backend.plan(_decode([1, 2]), graph=True)
    backend.plan(_decode([2, 3]), graph=True)
    assert all(torch.isfinite(out).all() for out in _run(backend, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kv_seq_lens_host": torch.tensor([0, 1, 3]), "paged_kv_last_page_len_host": torch.tensor([1, 2])},
            "sequence 0 has 2 tokens in the step; its KV length is 1",
        ),
        ({"kv_seq_lens_host": torch.tensor([0, 2, 9])}, "gives sequence 1 1 pages of 4; its KV length 7 .* needs 2"),
    ],
)
def test_contradictory_lengths(
    make_backend: MakeBackend, spec: AttentionSpec, changes: dict[str, torch.Tensor], message: str
) -> None:
    metadata = build_attention_metadata([2, 2], [2, 2], TABLES[:2], 4)
    with pytest.raises(ValueError, match=message):
        make_backend([spec]).plan(replace(metadata, **changes))


def test_sequences_get_the_same_bits_in_any_order(make_backend: MakeBackend, spec: AttentionSpec) -> None:
    q_lens, kv_lens = [1, 3, 1, 4], [9, 3, 5, 12]
    starts = [0, 1, 4, 5]
    q, k, v = _inputs(sum(q_lens), spec, 0)
    rows = [slice(start, start + n) for start, n in zip(starts, q_lens, strict=True)]
    results = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
        backend = make_backend([spec])
        backend.plan(
            build_attention_metadata(
                [q_lens[i] for i in order], [kv_lens[i] for i in order], [TABLES[i] for i in order], 4
            )
        )
        index = torch.cat([torch.arange(9)[rows[i]] for i in order])
        out = torch.empty_like(q)
        backend.run(q[index], k[index], v[index], out, 0)
        results.append(out[index.argsort()])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
