"""The Triton kernels against the torch implementations on the CPU: in Triton's interpreter, or compiled on a GPU.

Not collected by itself: `test_kernels` runs it in a process of its own, since Triton decides once, when it is
imported, whether it interprets. XLLM_KERNEL_DEVICE says where the kernels run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from xllm_models.ops import topk_softmax
from xllm_models.ops.moe import fused_experts_static
from xllm_models.ops.triton_kernels import TRITON_KERNELS

DEVICE = os.environ["XLLM_KERNEL_DEVICE"]
# The interpreter has no bfloat16.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
# The result's last bit, and a sum's order in half precision.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

pytestmark = pytest.mark.parametrize("dtype", DTYPES)


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def agree(name: str, *arguments: Any, kernel: Callable[..., Any] | None = None, factor: float = 1.0) -> Any:
    """The kernel of op `name` gives what the op's torch implementation gives on the CPU; returns the former."""
    kernel = kernel or TRITON_KERNELS[name]
    moved = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in arguments]
    # A tensor's copy to a device drops its strides where it is a view.
    for index, (before, after) in enumerate(zip(arguments, moved, strict=True)):
        if isinstance(before, torch.Tensor) and before.stride() != after.stride():
            whole = before.as_strided((before.untyped_storage().nbytes() // before.element_size(),), (1,), 0).to(DEVICE)
            moved[index] = whole.as_strided(before.shape, before.stride(), before.storage_offset())
    got, want = kernel(*moved), getattr(torch.ops.xllm, name)(*arguments)
    for ours, theirs in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (got, want)), strict=True):
        assert ours.is_contiguous()
        assert ours.dtype == theirs.dtype
        tolerance = factor * TOLERANCE.get(theirs.dtype, 0.0)  # integers are equal
        torch.testing.assert_close(
            ours.cpu(),
            theirs,
            rtol=tolerance,
            atol=tolerance * float(theirs.nan_to_num().abs().max()) if theirs.numel() else 0,
            equal_nan=True,
        )
    return got


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(0, 48), (1, 48), (7, 48), (3, 1024), (2, 1500)])
def test_norms(dtype: torch.dtype, rows: int, size: int, unit_offset: bool) -> None:
    x, residual, weight = (random(*s, dtype=dtype) for s in ((rows, size), (rows, size), (size,)))
    agree("rms_norm", x, weight, 1e-5, unit_offset)
    agree("fused_add_rms_norm", x, residual * 2, weight, 1e-5, unit_offset)


def test_norms_of_views_and_of_more_dimensions(dtype: torch.dtype) -> None:
    x, weight = random(5, 6, 8, dtype=dtype), random(8, dtype=dtype)
    agree("rms_norm", x[:, 1:4], weight, 1e-6)
    agree("rms_norm", random(8, 5, dtype=dtype).t(), weight, 1e-6)
    agree("fused_add_rms_norm", x[:, 0], x[:, 2], weight, 1e-6)
    # An address that is no multiple of 16 bytes.
    agree("rms_norm", random(1, 9, dtype=dtype)[:, 1:], weight, 1e-6)


@pytest.mark.parametrize(("rows", "size"), [(0, 20), (1, 20), (7, 48), (3, 1500)])
def test_gated_activations(dtype: torch.dtype, rows: int, size: int) -> None:
    x = random(rows, 2 * size, dtype=dtype, scale=3.0)
    agree("silu_and_mul", x)
    for approximate in ("none", "tanh"):
        agree("gelu_and_mul", x, approximate)


def test_gated_activations_of_views_and_bad_input(dtype: torch.dtype) -> None:
    agree("silu_and_mul", random(4, 3, 24, dtype=dtype)[:, 1])
    agree("gelu_and_mul", random(24, 5, dtype=dtype).t(), "tanh")
    agree("silu_and_mul", random(2, 3, 8, dtype=dtype))
    with pytest.raises(ValueError, match="silu_and_mul needs an even last dimension, got 7"):
        agree("silu_and_mul", random(2, 7, dtype=dtype))
    with pytest.raises(RuntimeError, match="approximate must be"):
        TRITON_KERNELS["gelu_and_mul"](random(2, 8, dtype=dtype), "sigmoid")


def heads(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Any:
    """q and k as views of a fused projection, and positions."""
    qkv = random(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    positions = torch.randint(0, 11, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))
    return qkv[:, :num_heads], qkv[:, num_heads : num_heads + num_kv_heads], positions


def table(num_features: int) -> torch.Tensor:
    angles = random(11, num_features // 2, dtype=torch.float32, scale=3.0)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


@pytest.mark.parametrize("num_features", [24, 16, 4])
@pytest.mark.parametrize(("tokens", "num_heads", "num_kv_heads"), [(0, 4, 2), (1, 4, 4), (5, 6, 1), (3, 40, 3)])
def test_rotary(dtype: torch.dtype, num_features: int, tokens: int, num_heads: int, num_kv_heads: int) -> None:
    q, k, positions = heads(tokens, num_heads, num_kv_heads, 24, dtype)
    agree("rotary", q, k, positions.int(), table(num_features))
    weights = random(24, dtype=dtype), random(24, dtype=dtype) + 1
    for interleaved in (False, True):
        agree("rotary", q, k, positions, table(num_features), interleaved)
        for unit_offset in (False, True):
            arguments = (q, k, *weights, positions, table(num_features), 1e-6, unit_offset, interleaved)
            agree("qk_norm_rope", *arguments, factor=2.0)


def test_rotary_in_qwen3_and_gemma3_shapes(dtype: torch.dtype) -> None:
    for num_heads, num_kv_heads, head_dim in ((16, 8, 128), (4, 1, 256)):
        q, k, positions = heads(3, num_heads, num_kv_heads, head_dim, dtype)
        weights = random(head_dim, dtype=dtype), random(head_dim, dtype=dtype) + 1
        agree("qk_norm_rope", q, k, *weights, positions, table(head_dim), 1e-6, head_dim == 256, factor=2.0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 16])
@pytest.mark.parametrize(("num_outputs", "num_features"), [(37, 72), (64, 1024), (16, 1500)])
def test_linear_of_few_rows(dtype: torch.dtype, rows: int, num_outputs: int, num_features: int, bias: bool) -> None:
    from xllm_models.kernels.linear import few_rows

    x, weight = random(rows, num_features + 8, dtype=dtype)[:, 8:], random(num_outputs, num_features, dtype=dtype)
    extra = random(num_outputs, dtype=dtype) if bias else None
    agree("linear", x, weight, extra, kernel=few_rows, factor=2.0)


def test_linear_of_any_rows(dtype: torch.dtype) -> None:
    weight = random(16, 32, dtype=dtype)
    for shape in ((0, 32), (1, 32), (40, 32), (2, 3, 32)):
        agree("linear", random(*shape, dtype=dtype), weight, factor=2.0)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("size", "start", "count"), [(32, 5, 6), (1500, 5, 4), (7, 5, 1), (7, 0, 6), (7, 30, 0)])
def test_embedding_shard(dtype: torch.dtype, size: int, start: int, count: int, id_dtype: torch.dtype) -> None:
    weight = random(6, size, dtype=dtype)
    edges = (start, start + count - 1, start - 1, start + count, 0, start + 6, 31, -1, 2**31 - 1, start)
    for number in (len(edges), 1, 0):
        ids = torch.tensor(edges[:number], dtype=id_dtype)
        got = agree("embedding_shard", ids, weight, start, count, 31)
        for row, index in zip(got.cpu(), edges, strict=False):
            if 0 <= index < 31:
                expected = weight[index - start] if start <= index < start + count else torch.zeros(size, dtype=dtype)
                assert torch.equal(row, expected)
            else:
                assert torch.isnan(row).all()


def test_embedding_shard_of_views(dtype: torch.dtype) -> None:
    ids = torch.arange(12)
    agree("embedding_shard", ids[::2], random(6, 9, dtype=dtype)[1:, 2:], 3, 5, 12)
    agree("embedding_shard", ids[1:].view(1, 11), random(9, 6, dtype=dtype).t(), 3, 6, 12)


def test_embedding_shard_of_more_elements_than_int32_counts(dtype: torch.dtype, tmp_path: Path) -> None:
    num_elements = 2**31 + 8
    if DEVICE == "cuda":
        memory = torch.empty(num_elements, dtype=dtype, device=DEVICE)
    else:  # a sparse file: only what is written takes memory
        memory = torch.from_file(str(tmp_path / "weight"), shared=True, size=num_elements, dtype=dtype)
    weight = memory.as_strided((3, 8), (2**30, 1))
    weight.copy_(random(3, 8, dtype=dtype))
    ids = torch.tensor([12, 10, 13, 11], dtype=torch.int32, device=DEVICE)
    got = TRITON_KERNELS["embedding_shard"](ids, weight, 10, 3, 20)
    want = random(3, 8, dtype=dtype)[[2, 0, 0, 1]]
    want[2] = 0
    assert isinstance(got, torch.Tensor)
    assert torch.equal(got.cpu(), want)


def distinct(rows: int, columns: int, *, dtype: torch.dtype) -> torch.Tensor:
    """Random values without equal ones in a row, of which either choice would be right."""
    generator = torch.Generator().manual_seed(rows)
    order = [torch.randperm(columns, generator=generator) for _ in range(rows)]
    return (torch.stack(order) if order else torch.empty(0, columns)).to(dtype) * 0.25


def agree_moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    weights: tuple[Any, ...],
    top_k: int,
    normalize: bool,
) -> None:
    """Routing and experts agree, with the weights and ids in the dtypes of either routing: softmax, or torch.topk."""
    _, ids = agree("topk_softmax", router_logits, top_k, normalize)
    assert ids.dtype == torch.int32
    chosen = topk_softmax(router_logits, top_k, normalize)
    scores = router_logits.float().sigmoid().topk(top_k)  # fp32 and int64
    for one in (chosen, (scores.values, scores.indices)):
        agree("fused_experts", x, *one, *weights, factor=3.0)
        agree("fused_experts", x, *one, *weights, kernel=fused_experts_static, factor=3.0)


@pytest.mark.parametrize("tokens", [0, 1, 20])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "normalize"), [(6, 2, True), (6, 2, False), (1, 1, True), (9, 9, False)]
)
def test_moe(dtype: torch.dtype, tokens: int, num_experts: int, top_k: int, normalize: bool) -> None:
    hidden, features = 32, 20
    x, router_logits = random(tokens, hidden, dtype=dtype), distinct(tokens, num_experts, dtype=dtype)
    gate_up = random(num_experts, 2 * features, hidden, dtype=dtype, scale=0.3)
    down = random(num_experts, hidden, features, dtype=dtype, scale=0.3)
    agree_moe(x, router_logits, (gate_up, down), top_k, normalize)


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("biased", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_moe_with_biases(dtype: torch.dtype, tokens: int, biased: tuple[bool, bool], activation: str) -> None:
    num_experts, hidden, features = 6, 32, 20
    x, router_logits = random(tokens, hidden, dtype=dtype), distinct(tokens, num_experts, dtype=dtype)
    gate_up = random(num_experts, 2 * features, hidden, dtype=dtype, scale=0.3)
    down = random(num_experts, hidden, features, dtype=dtype, scale=0.3)
    gate_up_bias = random(num_experts, 2 * features, dtype=dtype) if biased[0] else None
    down_bias = random(num_experts, hidden, dtype=dtype) if biased[1] else None
    weights = (gate_up, down, gate_up_bias, down_bias, activation, 1.5, 0.8)
    agree_moe(x, router_logits, weights, 2, True)


def test_moe_of_another_activation(dtype: torch.dtype) -> None:
    weights = random(2, 8, 16, dtype=dtype), random(2, 16, 4, dtype=dtype)
    x, chosen = random(3, 16, dtype=dtype), topk_softmax(random(3, 2, dtype=dtype), 1, True)
    for function in (TRITON_KERNELS["fused_experts"], fused_experts_static):
        with pytest.raises(
            ValueError, match=r"activation 'gelu' of experts is not supported; supported: \['silu', 'swigluoai'\]"
        ):
            function(x, *chosen, *weights, None, None, "gelu")


def test_moe_of_more_pairs_than_one_program_sorts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xllm_models.kernels.moe_align.MAX_PAIRS_ONE_PROGRAM", 100)
    weights = random(9, 16, 16, dtype=dtype, scale=0.3), random(9, 16, 8, dtype=dtype, scale=0.3)
    agree_moe(random(14, 16, dtype=dtype), distinct(14, 9, dtype=dtype), weights, 8, False)


def test_moe_whose_tokens_all_choose_one_expert(dtype: torch.dtype) -> None:
    router_logits = torch.zeros(70, 8, dtype=dtype)
    router_logits[:, 5] = 9.0
    weights = random(8, 40, 16, dtype=dtype, scale=0.3), random(8, 16, 20, dtype=dtype, scale=0.3)
    agree_moe(random(70, 16, dtype=dtype), router_logits, weights, 1, True)


def test_tiles_of_a_kernel_are_those_of_torch(dtype: torch.dtype) -> None:
    from xllm_models.kernels.moe_align import _align_many_pairs, align_pairs

    for num_pairs, num_experts in ((1, 1), (5, 3), (64, 2), (100, 128), (256, 8)):
        generator = torch.Generator().manual_seed(num_pairs)
        experts = torch.randint(0, num_experts, (num_pairs,), generator=generator, dtype=torch.int32).to(DEVICE)
        got = align_pairs(experts, num_experts)
        want = _align_many_pairs(experts, num_experts, got.rows, got.count)
        for ours, theirs in zip(got.tensors, want.tensors, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_row_that_is_no_number_still_chooses_experts(dtype: torch.dtype) -> None:
    from xllm_models.kernels.moe_align import topk_softmax

    _, experts = topk_softmax(torch.full((2, 6), torch.nan, dtype=dtype, device=DEVICE), 4, True)
    assert bool(((experts >= 0) & (experts < 6)).all())
