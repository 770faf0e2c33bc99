"""Layers with state: Gated DeltaNet against transformers' rules and a float64 loop, slots, chunks and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as hf

from xllm_attention import (
    AttentionBackend,
    AttentionSpec,
    BackendLimits,
    GatedDeltaNetSpec,
    StateLayer,
    create_backend,
    forward_context,
)
from xllm_metadata import LayerCache, StaticAttentionMetadata, allocate_caches, build_attention_metadata

SPEC = GatedDeltaNetSpec(num_k_heads=2, num_v_heads=4, head_k_dim=8, head_v_dim=6, conv_kernel_size=4)
ATTENTION = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0)
LAYERS = (ATTENTION, SPEC, ATTENTION)  # the state layer is layer 1
PAGE_SIZE, NUM_SLOTS = 4, 6


class Model:
    """One Gated DeltaNet layer in a hybrid backend, and its rows by sequence and position."""

    def __init__(self, dtype: torch.dtype = torch.float64, *, fill: float = torch.nan, max_len: int = 300) -> None:
        self.limits = BackendLimits(
            device=torch.device("cpu"), dtype=dtype, max_num_seqs=8, max_num_tokens=2 * max_len, max_model_len=max_len
        )
        self.backend: AttentionBackend = create_backend("torch", LAYERS, self.limits)
        needed = [spec.cache_specs(dtype) for spec in LAYERS]
        sizes = {"num_pages": 400, "page_size": PAGE_SIZE, "num_slots": NUM_SLOTS}
        self.caches = allocate_caches(needed, **sizes, fill=fill)
        self.backend.bind_kv_caches(self.caches)
        random = torch.Generator().manual_seed(3)
        channels, heads = SPEC.num_channels, SPEC.num_v_heads
        self.qkv, self.b, self.a = (
            torch.randn(4, max_len, size, generator=random, dtype=torch.float64).to(dtype)
            for size in (channels, heads, heads)
        )
        self.weights = [
            torch.randn(channels, 4, generator=random, dtype=torch.float64).to(dtype),
            torch.rand(heads, generator=random, dtype=torch.float64).to(dtype),
            torch.randn(heads, generator=random, dtype=torch.float64).to(dtype),
        ]
        self.layer = StateLayer(SPEC, 1)
        self.lens = [0, 0, 0, 0]

    @property
    def state(self) -> LayerCache:
        return self.caches[1]

    def step(
        self,
        parts: Sequence[tuple[int, int]],
        slots: Sequence[int],
        *,
        write: Sequence[int] | None = None,
        padding: int = 0,
        graph: bool = False,
    ) -> list[torch.Tensor]:
        """(sequence, number of its next rows) of one step -> the output of each part."""
        rows = []
        for sequence, count in parts:
            rows += [(sequence, self.lens[sequence] + i) for i in range(count)]
            self.lens[sequence] += count
        kv_lens = [self.lens[sequence] for sequence, _ in parts]
        tables = [list(range(100 * sequence, 100 * (sequence + 1))) for sequence, _ in parts]
        metadata = build_attention_metadata(
            [count for _, count in parts],
            kv_lens,
            tables,
            PAGE_SIZE,
            state_slots=slots,
            state_write_slots=write,
        )
        if graph:
            size = len(parts) + padding
            optional = self.backend.optional_fields
            static = StaticAttentionMetadata(
                max_num_tokens=8, max_num_seqs=8, max_num_pages=400, device="cpu", optional=optional
            )
            static.fill(metadata, num_tokens=size, num_seqs=size)
            self.backend.plan(static, graph=True)
        else:
            self.backend.plan(metadata)
        index = tuple(torch.tensor(rows, dtype=torch.int64).reshape(-1, 2).T)
        inputs = [
            torch.cat((x[index], torch.full((padding, x.shape[2]), torch.nan, dtype=x.dtype))) for x in self._rows
        ]
        with forward_context(self.backend):
            out = self.layer([*inputs, *self.weights], (SPEC.num_v_heads, SPEC.head_v_dim))
        assert not out[len(rows) :].any() or graph
        return list(out[: len(rows)].split([count for _, count in parts]))

    @property
    def _rows(self) -> tuple[torch.Tensor, ...]:
        return self.qkv, self.b, self.a

    def expected(self, sequence: int, stop: int) -> torch.Tensor:
        """Rows [0, stop) of a sequence by transformers' convolution and recurrent rule."""
        conv_weight, a_log, dt_bias = self.weights
        mixed = hf.causal_conv1d_fn(self.qkv[sequence, :stop].T[None], conv_weight, None, activation="silu")[0].T
        sizes = (SPEC.num_k_heads * SPEC.head_k_dim,) * 2 + (SPEC.num_v_heads * SPEC.head_v_dim,)
        q, k, v = (
            x.reshape(1, stop, -1, dim)
            for x, dim in zip(mixed.split(sizes, dim=1), (SPEC.head_k_dim,) * 2 + (SPEC.head_v_dim,), strict=True)
        )
        beta = self.b[sequence, :stop].sigmoid()[None]
        g = -a_log.float().exp() * torch.nn.functional.softplus(self.a[sequence, :stop].float() + dt_bias)[None]
        out, _ = hf.torch_recurrent_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
        return out[0]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cuts", [[200], [1, 199], [64, 64, 72], [3, 1, 1, 70, 125], [1] * 20])
def test_any_chunks_equal_transformers(cuts: list[int]) -> None:
    model = Model(torch.float32)
    found = torch.cat([model.step([(0, count)], [4])[0] for count in cuts])
    close(found, model.expected(0, sum(cuts)))


def test_the_recurrence_in_float64() -> None:
    """Written out row by row from the formula of the class."""
    model = Model(torch.float64)
    found = torch.cat([model.step([(0, count)], [2])[0] for count in (70, 1, 5)])
    conv_weight, a_log, dt_bias = model.weights
    padded = torch.cat((torch.zeros(3, SPEC.num_channels, dtype=torch.float64), model.qkv[0, :76]))
    state = torch.zeros(4, 8, 6, dtype=torch.float64)
    for row in range(76):
        mixed = torch.nn.functional.silu((padded[row : row + 4].T * conv_weight).sum(1))
        q, k, v = mixed[:16].view(2, 8), mixed[16:32].view(2, 8), mixed[32:].view(4, 6)
        g = -a_log.exp() * torch.nn.functional.softplus(model.a[0, row] + dt_bias)
        for head in range(4):
            query, key = (x[head // 2] / (x[head // 2].square().sum() + 1e-6).sqrt() for x in (q, k))
            state[head] *= g[head].exp()
            delta = model.b[0, row, head].sigmoid() * (v[head] - key @ state[head])
            state[head] += torch.outer(key, delta)
            torch.testing.assert_close(found[row, head], query @ state[head] / 8**0.5, rtol=1e-9, atol=1e-9)
    assert model.state.ssm is not None
    torch.testing.assert_close(model.state.ssm[2], state, rtol=1e-9, atol=1e-9)


def test_mixed_steps_of_several_sequences() -> None:
    model = Model(torch.float32)
    found: list[list[torch.Tensor]] = [[] for _ in range(3)]
    for parts in ([(0, 5)], [(1, 1)], [(0, 1), (1, 7), (2, 66)], [(2, 1), (0, 1), (1, 1)], [(1, 0), (0, 3)]):
        slots = [(5, 0, 3)[sequence] for sequence, _ in parts]
        for (sequence, _), out in zip(parts, model.step(parts, slots, padding=2), strict=True):
            found[sequence].append(out)
    for sequence, outs in enumerate(found):
        close(torch.cat(outs), model.expected(sequence, model.lens[sequence]))
    assert_untouched(model, {5, 0, 3})


def assert_untouched(model: Model, used: set[int]) -> None:
    for tensor in (model.state.conv, model.state.ssm):
        assert tensor is not None
        for slot in range(NUM_SLOTS):
            assert bool(tensor[slot].isnan().all()) == (slot not in used)


@pytest.mark.parametrize("padding", [0, 2])
def test_a_full_graph_s_decode_step(padding: int) -> None:
    """Padding rows have slot -1, and rows that are not read: all shapes are those of the bucket."""
    model = Model(torch.float32)
    model.step([(0, 9), (1, 4)], [5, 1])
    outs = [model.step([(0, 1), (1, 1)], [5, 1], padding=padding, graph=True) for _ in range(3)]
    for sequence, (start, stop) in enumerate(((9, 12), (4, 7))):
        close(torch.cat([out[sequence] for out in outs]), model.expected(sequence, stop)[start:])
    assert_untouched(model, {5, 1})


def test_padding_alone_writes_nothing() -> None:
    model = Model(torch.float32)
    model.step([], [], padding=2, graph=True)
    assert_untouched(model, set())


def test_a_prompt_of_one_token_does_not_read_its_slot() -> None:
    model = Model(torch.float32)  # the slots are NaN
    (out,) = model.step([(2, 1)], [0])
    close(out, model.expected(2, 1))


@pytest.mark.parametrize("graph", [False, True])
def test_a_write_slot_of_its_own_leaves_the_old_state(graph: bool) -> None:
    """A host rolls back rejected draft tokens by reading the old slot again."""
    model = Model(torch.float32)
    model.step([(0, 9)], [5])
    before = [tensor.clone() for _, tensor in model.state.items()]
    for _ in range(2):
        model.lens[0] = 9
        (out,) = model.step([(0, 1)], [5], write=[2], graph=graph)
        close(out, model.expected(0, 10)[9:])
    for tensor, old in zip((model.state.conv, model.state.ssm), before, strict=True):
        assert tensor is not None
        assert torch.equal(tensor[5], old[5])
        assert not torch.equal(tensor[2], tensor[5])
    close(model.step([(0, 1)], [2])[0], model.expected(0, 11)[10:])


def test_a_slot_of_minus_one_neither_reads_nor_writes() -> None:
    model = Model(torch.float32)
    (out,) = model.step([(0, 5)], [-1])
    close(out, model.expected(0, 5))
    assert_untouched(model, set())


def test_bfloat16_states_stay_in_fp32() -> None:
    model = Model(torch.bfloat16)
    assert model.state.ssm is not None
    assert model.state.ssm.dtype is torch.float32
    found = torch.cat([model.step([(0, count)], [4])[0] for count in (30, 1, 1)])
    torch.testing.assert_close(found.float(), model.expected(0, 32).float(), rtol=3e-2, atol=3e-2)


def test_missing_slots_are_named() -> None:
    model = Model()
    step = build_attention_metadata([1], [1], [[0]], PAGE_SIZE, state_slots=[0])
    for field in ("linear_state_indices", "has_initial_state"):
        with pytest.raises(ValueError, match=f"{field} is None; every step of a model with state layers must have it"):
            model.backend.plan(replace(step, **{field: None}))


def test_a_backend_made_in_inference_mode_plans_outside_of_it() -> None:
    with torch.inference_mode():
        backend = create_backend("torch", LAYERS, Model().limits)
    model = Model(torch.float64)
    backend.bind_kv_caches(model.caches)
    model.backend = backend
    model.step([(0, 9)], [5])
    model.step([(0, 1)], [5], padding=1, graph=True)


def test_state_layers_need_attention_layers() -> None:
    limits = Model().limits
    with pytest.raises(ValueError, match="no spec is that of an attention layer"):
        create_backend("torch", [SPEC], limits)


def test_an_attention_layer_has_no_state() -> None:
    model = Model()
    model.backend.plan(build_attention_metadata([1], [1], [[0]], PAGE_SIZE, state_slots=[0]))
    out = torch.zeros(1, 4, 6)
    with forward_context(model.backend), pytest.raises(ValueError, match="layer 0 has no state"):
        torch.ops.xllm.state_layer([out], out, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_k_heads": 0}, "num_k_heads is 0; it must be at least 1"),
        ({"num_v_heads": 3}, "num_v_heads is 3; it must be a multiple of num_k_heads, 2"),
        ({"conv_kernel_size": 1}, "conv_kernel_size is 1; it must be at least 2"),
    ],
)
def test_bad_specs_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **change)


def test_states_of_another_shape_are_refused() -> None:
    limits = Model().limits
    needed = [spec.cache_specs(limits.dtype) for spec in LAYERS]
    caches = allocate_caches(needed, num_pages=4, page_size=PAGE_SIZE, num_slots=2)
    caches[1] = replace(caches[1], conv=torch.zeros(2, SPEC.num_channels, 4, dtype=limits.dtype))
    backend = create_backend("torch", LAYERS, limits)
    with pytest.raises(ValueError, match=r"conv cache of layer 1 has shape .*its layer needs \[num_slots, 56, 3\]"):
        backend.bind_kv_caches(caches)
