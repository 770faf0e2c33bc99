"""One tile of keys added to running sums. Owns the formula; knows no lengths and no work list.

Legend: M query rows, N keys, D head dim. Softmax is kept online with
base-2 exponents. Keys and values that a row must not see are masked where they are loaded, so that whatever lies in
unused pages never enters the arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator]
def scores_of(products: tl.tensor, scale: tl.tensor, soft_cap: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """Scores in units of log 2: scaled, and capped where CAP is set."""
    if CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1); neither end of it overflows.
        scaled = products * (scale / soft_cap)
        return soft_cap * LOG2_E * (1.0 - 2.0 / (tl.exp2(scaled * (2.0 * LOG2_E)) + 1.0))
    return products * (scale * LOG2_E)


@triton.jit  # type: ignore[untyped-decorator]
def add_tile(
    acc: tl.tensor, top: tl.tensor, total: tl.tensor, q: tl.tensor, key: tl.tensor, end: tl.tensor,
    q_positions: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, pages_ptr: tl.tensor, k_sp: tl.tensor, k_st: tl.tensor,
    k_sd: tl.tensor, v_sp: tl.tensor, v_st: tl.tensor, v_sd: tl.tensor, scale: tl.tensor, soft_cap: tl.tensor,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGED: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, CAUSAL: tl.constexpr, IEEE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Adds the keys at positions key [N] below `end` to (acc [M, D], top [M], total [M]).

    They lie in the paged cache or, unpaged, one after the other. Keys and values are loaded in one layout, so that
    page indices and offsets are worked out once for both.
    """
    exists = key < end
    element = tl.arange(0, D_PAD)
    inside = exists[:, None] & (element < D)[None, :]
    if PAGED:
        page = tl.load(pages_ptr + key // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
        within = (key % PAGE_SIZE).to(tl.int64)
        k_rows = page * k_sp + within * k_st
        v_rows = page * v_sp + within * v_st
    else:
        k_rows = key.to(tl.int64) * k_st
        v_rows = key.to(tl.int64) * v_st
    k = tl.load(k_ptr + k_rows[:, None] + (element * k_sd)[None, :], mask=inside, other=0.0)
    v = tl.load(v_ptr + v_rows[:, None] + (element * v_sd)[None, :], mask=inside, other=0.0)
    scores = scores_of(tl.dot(q, tl.trans(k), input_precision="ieee" if IEEE else "tf32"), scale, soft_cap, CAP)
    visible = exists[None, :]
    if CAUSAL:
        visible = visible & (key[None, :] <= q_positions[:, None])
    if WINDOW > 0:
        visible = visible & (key[None, :] > q_positions[:, None] - WINDOW)
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row that sees nothing yet has top -inf, and -inf - -inf is NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = tl.exp2(top - base)
    weights = tl.exp2(scores - base[:, None])
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee" if IEEE else "tf32")
    return acc, new_top, total * shrink + tl.sum(weights, 1)
