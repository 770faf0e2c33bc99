"""Adds one tile of keys and values to an online softmax (as in FlashAttention), with base-2 exponents.

Legend: M query rows, N keys, D head dim, D_PAD the next power of two. In a latent layer D is the value head dim, and a
key has REST elements more. Slots that hold no token are masked in the loads, so that a NaN in an unused slot never
enters the arithmetic. Lengths and the work list belong to `attend`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fp8 import from_fp8

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator]
def scores_of(products: tl.tensor, scale: tl.tensor, soft_cap: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """q.k products as scores for exp2: scaled, soft-capped where CAP is set, and multiplied by log2(e)."""
    if CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which overflows for no x.
        scaled = products * (scale / soft_cap)
        return soft_cap * LOG2_E * (1.0 - 2.0 / (tl.exp2(scaled * (2.0 * LOG2_E)) + 1.0))
    return products * (scale * LOG2_E)


@triton.jit  # type: ignore[untyped-decorator]
def without_bad_values(k: tl.tensor, v: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(k, v, bad): where an element of v is not finite, it is 0, and the element of k at the same index is NaN.

    One NaN in a key makes its score NaN, so no reduction over the head is needed.
    """
    bad = (tl.abs(v.to(tl.float32)) < float("inf")) == 0  # also for NaN
    return tl.where(bad, float("nan"), k), tl.where(bad, 0.0, v), bad


@triton.jit  # type: ignore[untyped-decorator]
def append_latent(
    source: tl.tensor, target: tl.tensor, source_stride: tl.tensor, target_stride: tl.tensor,
    D: tl.constexpr, D_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr,
) -> None:  # fmt: skip
    """Copies one latent key. Elements of its value that are not finite become 0, and the others NaN in this case."""
    element = tl.arange(0, D_PAD)
    rest = tl.arange(0, REST_PAD)
    k = tl.load(source + element * source_stride, mask=element < D, other=0.0)
    k_rest = tl.load(source + (D + rest) * source_stride, mask=rest < REST, other=0.0)
    bad = (tl.abs(k.to(tl.float32)) < float("inf")) == 0  # also for NaN
    any_bad = tl.max(bad.to(tl.int32), 0) > 0
    tl.store(target + element * target_stride, tl.where(bad, 0.0, k), mask=element < D)
    tl.store(target + (D + rest) * target_stride, tl.where(any_bad, float("nan"), k_rest), mask=rest < REST)


@triton.jit  # type: ignore[untyped-decorator]
def add_tile(
    acc: tl.tensor, row_max: tl.tensor, row_sum: tl.tensor, q: tl.tensor, q_rest: tl.tensor, key: tl.tensor,
    end: tl.tensor, q_positions: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, pages_ptr: tl.tensor,
    k_stride_page: tl.tensor, k_stride_token: tl.tensor, k_stride_dim: tl.tensor, v_stride_page: tl.tensor,
    v_stride_token: tl.tensor, v_stride_dim: tl.tensor, scale: tl.tensor, soft_cap: tl.tensor,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGED: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, CAUSAL: tl.constexpr, IEEE: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr,
    FP8: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Adds the keys at positions key [N] below `end` to the softmax state: acc [M, D_PAD], row_max [M], row_sum [M].

    With PAGED, k_ptr and v_ptr are caches; else the rows of one prompt. Keys and values are loaded in one layout, so
    that page indices and offsets are computed once for both. With REST the first D elements of a key are the value too,
    and q_rest [M, REST_PAD] has the queries' other elements. With FP8 keys and values are entries of an fp8
    cache, whose scales are left to the caller.
    """
    valid = key < end
    element = tl.arange(0, D_PAD)
    mask = valid[:, None] & (element < D)[None, :]
    if PAGED:
        page = tl.load(pages_ptr + key // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
        page_slot = (key % PAGE_SIZE).to(tl.int64)
        k_rows = page * k_stride_page + page_slot * k_stride_token
        v_rows = page * v_stride_page + page_slot * v_stride_token
    else:
        k_rows = key.to(tl.int64) * k_stride_token
        v_rows = key.to(tl.int64) * v_stride_token
    k = tl.load(k_ptr + k_rows[:, None] + (element * k_stride_dim)[None, :], mask=mask, other=0.0)
    if REST > 0:
        v = k
        rest = tl.arange(0, REST_PAD)
        k_rest = tl.load(
            k_ptr + k_rows[:, None] + ((D + rest) * k_stride_dim)[None, :],
            mask=valid[:, None] & (rest < REST)[None, :],
            other=0.0,
        )
        products = tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee" if IEEE else "tf32")
        products = tl.dot(q, tl.trans(k), products, input_precision="ieee" if IEEE else "tf32")
    else:
        v = tl.load(v_ptr + v_rows[:, None] + (element * v_stride_dim)[None, :], mask=mask, other=0.0)
        if FP8:
            k, v = from_fp8(k, q), from_fp8(v, q)
        products = tl.dot(q, tl.trans(k), input_precision="ieee" if IEEE else "tf32")
    scores = scores_of(products, scale, soft_cap, CAP)
    visible = valid[None, :]
    if CAUSAL:
        visible = visible & (key[None, :] <= q_positions[:, None])
    if WINDOW > 0:
        visible = visible & (key[None, :] > q_positions[:, None] - WINDOW)
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A row that has seen no key yet has row_max -inf, and -inf - -inf is NaN.
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - base)
    weights = tl.exp2(scores - base[:, None])
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee" if IEEE else "tf32")
    return acc, new_max, row_sum * rescale + tl.sum(weights, 1)
