"""What holds for every backend: order of calls, limits, groups, plan counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from xllm_attention import (
    Attention,
    AttentionBackend,
    AttentionSpec,
    BackendCapabilities,
    BackendLimits,
    Phase,
    create_backend,
    forward_context,
)
from xllm_metadata import LayerCache, build_attention_metadata

MakeBackend = Callable[..., AttentionBackend]
MakeCaches = Callable[..., list[LayerCache]]

LIMITS = BackendLimits(
    device=torch.device("cpu"), dtype=torch.float32, max_num_seqs=4, max_num_tokens=16, max_model_len=12
)
DECODE = build_attention_metadata([1], [2], [[0]], 4)


def _tensors(num_rows: int, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.ones(num_rows, spec.num_heads, spec.head_dim)
    k = torch.ones(num_rows, spec.num_kv_heads, spec.head_dim)
    return q, k, k, torch.empty_like(q)


def test_order_of_calls(make_backend: MakeBackend, make_caches: MakeCaches, spec: AttentionSpec) -> None:
    backend = make_backend([spec], bind=False)
    with pytest.raises(RuntimeError, match="plan was called before bind_kv_caches"):
        backend.plan(DECODE)
    backend.bind_kv_caches(make_caches([spec]))
    with pytest.raises(RuntimeError, match="run was called before plan"):
        backend.run(*_tensors(1, spec), 0)
    backend.plan(DECODE)
    backend.run(*_tensors(1, spec), 0)
    backend.bind_kv_caches(make_caches([spec]))
    with pytest.raises(RuntimeError, match="run was called before plan"):
        backend.run(*_tensors(1, spec), 0)


def test_the_page_size_is_known_once_caches_are_bound(
    make_backend: MakeBackend, make_caches: MakeCaches, spec: AttentionSpec
) -> None:
    backend = make_backend([spec], bind=False)
    with pytest.raises(RuntimeError, match="page_size was read before bind_kv_caches"):
        _ = backend.page_size
    backend.bind_kv_caches(make_caches([spec], page_size=4))
    assert backend.page_size == 4
    backend.bind_kv_caches(make_caches([spec], page_size=8))
    assert backend.page_size == 8


def test_a_failed_plan_leaves_no_plan(make_backend: MakeBackend, spec: AttentionSpec) -> None:
    backend = make_backend([spec])
    backend.plan(DECODE)
    with pytest.raises(ValueError, match="max_seq_len"):
        backend.plan(build_attention_metadata([1], [999], [list(range(250))], 4))
    with pytest.raises(RuntimeError, match="run was called before plan"):
        backend.run(*_tensors(1, spec), 0)


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "message"),
    [
        ([1] * 5, [1] * 5, "number of sequences 5 exceeds max_num_seqs 4"),
        ([9, 8], [9, 8], "number of tokens 17 exceeds max_num_tokens 16"),
        ([1], [13], "max_seq_len 13 exceeds max_model_len 12"),
    ],
)
def test_limits(
    make_backend: MakeBackend, spec: AttentionSpec, q_lens: list[int], kv_lens: list[int], message: str
) -> None:
    backend = make_backend([spec], limits=LIMITS)
    with pytest.raises(ValueError, match=message):
        backend.plan(build_attention_metadata(q_lens, kv_lens, [[0, 1, 2, 3]] * len(q_lens), 4))
    backend.plan(build_attention_metadata([1] * 3 + [12], [12] * 4, [[0, 1, 2]] * 4, 4))


def test_the_plan_layout_follows_the_padded_size_and_not_the_lengths(
    make_backend: MakeBackend, spec: AttentionSpec
) -> None:
    backend = make_backend([spec])
    layouts = []
    for kv_lens in ([1, 1], [2, 7], [3, 1, 1]):
        backend.plan(build_attention_metadata([1] * len(kv_lens), kv_lens, [[0, 1]] * len(kv_lens), 4), graph=True)
        layouts.append(backend.plan_layout)
    assert layouts[0] == layouts[1] != layouts[2]


def _metadata(**changes: Any) -> Any:
    return replace(build_attention_metadata([2, 1], [2, 1], [[0], [1]], 4), **changes)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (_metadata(is_chunked_prefill=True), "is_prefill and is_chunked_prefill are both True"),
        (_metadata(is_prefill=False), "one token per sequence: 3 tokens, 2 sequences"),
        (_metadata(qo_indptr=None), "a prefill step must have both"),
        (_metadata(qo_indptr_host=None), "a prefill step must have both"),
    ],
)
def test_contradictory_metadata(make_backend: MakeBackend, spec: AttentionSpec, metadata: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_backend([spec]).plan(metadata)


def test_too_few_rows(make_backend: MakeBackend, spec: AttentionSpec) -> None:
    backend = make_backend([spec])
    backend.plan(build_attention_metadata([3], [3], [[0]], 4))
    with pytest.raises(ValueError, match="q has 2 rows; the planned step has 3 tokens"):
        backend.run(*_tensors(2, spec), 0)


def test_phase_that_cannot_be_captured(make_backend: MakeBackend, spec: AttentionSpec) -> None:
    backend = make_backend([spec])
    with pytest.raises(ValueError, match=r"'torch' cannot run a prefill step in a full graph.*\['decode'\]"):
        backend.plan(build_attention_metadata([3], [3], [[0]], 4), graph=True)


@pytest.mark.parametrize("limit", ["max_num_seqs", "max_num_tokens", "max_model_len"])
def test_limit_below_one(limit: str) -> None:
    changed: dict[str, Any] = {limit: 0}
    with pytest.raises(ValueError, match=f"{limit} is 0; it must be at least 1"):
        replace(LIMITS, **changed)


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 48), (4, 12), (5, 12), (16, 4)])
def test_most_pages_of_a_step(page_size: int, num_pages: int) -> None:
    assert LIMITS.max_num_pages(page_size) == num_pages


def test_no_layer() -> None:
    with pytest.raises(ValueError, match="no spec is that of an attention layer"):
        create_backend("torch", [], LIMITS)


@pytest.mark.parametrize(
    ("capabilities", "refusal"),
    [
        (BackendCapabilities(), None),
        (
            BackendCapabilities(dtypes=frozenset({torch.float16, torch.bfloat16})),
            "dtype torch.float32; served are [torch.bfloat16, torch.float16]",
        ),
        (BackendCapabilities(head_dims=frozenset({64, 128})), "head_dim 8; served are [64, 128]"),
        (BackendCapabilities(group_sizes=frozenset({1, 2})), "group size 3; served are [1, 2]"),
        (BackendCapabilities(device_types=frozenset({"cuda"})), "device cpu; served are ['cuda']"),
    ],
)
def test_capabilities(spec: AttentionSpec, capabilities: BackendCapabilities, refusal: str | None) -> None:
    assert capabilities.refusal(spec, LIMITS) == refusal


@pytest.mark.parametrize(
    ("capabilities", "refusal"),
    [
        (BackendCapabilities(), "latent keys; served are layers with keys and values"),
        (BackendCapabilities(latent=True), None),
        (BackendCapabilities(latent=True, head_dims=frozenset({64})), None),
        (BackendCapabilities(latent=True, latent_dims=frozenset({(576, 512)})), None),
        (
            BackendCapabilities(latent=True, latent_dims=frozenset({(96, 64), (24, 16)})),
            "latent head_dim and v_head_dim (576, 512); served are [(24, 16), (96, 64)]",
        ),
    ],
)
def test_latent_capabilities(capabilities: BackendCapabilities, refusal: str | None) -> None:
    latent = AttentionSpec(num_heads=4, num_kv_heads=1, head_dim=576, v_head_dim=512, latent=True, scale=1.0)
    assert capabilities.refusal(latent, LIMITS) == refusal


def test_unserved_dtype(spec: AttentionSpec) -> None:
    with pytest.raises(ValueError, match=r"'torch' cannot serve layer 0: dtype torch.int8"):
        create_backend("torch", [spec], replace(LIMITS, dtype=torch.int8))


def test_phase_of() -> None:
    assert Phase.of(DECODE) is Phase.DECODE
    assert Phase.of(build_attention_metadata([3], [3], [[0]], 4)) is Phase.PREFILL
    assert Phase.of(build_attention_metadata([2], [3], [[0]], 4)) is Phase.CHUNKED


def test_one_plan_a_group_a_step_over_28_layers(make_backend: MakeBackend, spec: AttentionSpec) -> None:
    """Every fourth layer attends to everything, the others to a window; each must use its own spec."""
    sliding = replace(spec, sliding_window=2)
    specs = [spec if layer_id % 4 == 3 else sliding for layer_id in range(28)]
    backend = make_backend(specs)
    full_layers = tuple(range(3, 28, 4))
    assert backend.groups == (tuple(i for i in range(28) if i not in full_layers), full_layers)
    assert backend.group_specs == (sliding, spec)
    layers = [Attention(spec, layer_id) for layer_id, spec in enumerate(specs)]
    generator = torch.Generator().manual_seed(1)
    outs: list[torch.Tensor] = []
    for steps, (q_lens, kv_lens) in enumerate([([4, 3], [4, 3]), ([1, 1], [5, 4]), ([2, 1], [7, 5])], 1):
        backend.plan(build_attention_metadata(q_lens, kv_lens, [[0, 1], [2, 3]], 4))
        q, k, v = torch.randn((3, sum(q_lens), 48), generator=generator)
        with forward_context(backend):
            outs = [layer(q, k[:, :16], v[:, :16]) for layer in layers]
        assert backend.plan_counts == (steps, steps)
    for layer_id, out in enumerate(outs):
        assert torch.equal(out, outs[3 if layer_id in full_layers else 0])
    assert not torch.equal(outs[0], outs[3])
