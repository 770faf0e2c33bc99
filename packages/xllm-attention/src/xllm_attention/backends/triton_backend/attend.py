"""The attention kernel: one program an item of the work list and kv head. Owns the formula; knows no lengths.

Legend: M query rows of a tile (a row is one token and one head of the group), N keys, D head dim, K kv heads, R rows
that are kept of a tile, C chunks. Softmax is kept online with base-2 exponents. Keys and values that a row must not
see are masked where they are loaded, so that whatever lies in unused pages never enters the arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .worklist import BEGIN, CHUNKS, END, FIRST, ITEM_WIDTH, KV_LEN, NUM_ROWS, PREFIX, SLOT, TABLE, TILE, TOKEN

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
def attend_tile(
    acc: tl.tensor, top: tl.tensor, total: tl.tensor, q: tl.tensor, positions: tl.tensor, start: tl.tensor, end: tl.tensor, q_positions: tl.tensor,
    k_ptr: tl.tensor, v_ptr: tl.tensor, pages_ptr: tl.tensor, k_sp: tl.tensor, k_st: tl.tensor, k_sd: tl.tensor, v_sp: tl.tensor, v_st: tl.tensor, v_sd: tl.tensor,
    scale: tl.tensor, soft_cap: tl.tensor,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    CAUSAL: tl.constexpr, PAGED: tl.constexpr, IEEE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Adds the keys [start, start + N) of one tile to the running (acc [M, D], top [M], total [M])."""
    key = start + positions
    exists = key < end
    if PAGED:
        page = tl.load(pages_ptr + key // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
        place = (key % PAGE_SIZE).to(tl.int64)
    else:
        page = tl.zeros_like(key).to(tl.int64)
        place = key.to(tl.int64)
    element = tl.arange(0, D_PAD)
    k = tl.load(
        k_ptr + (page * k_sp + place * k_st)[None, :] + (element * k_sd)[:, None],
        mask=exists[None, :] & (element < D)[:, None],
        other=0.0,
    )
    v = tl.load(
        v_ptr + (page * v_sp + place * v_st)[:, None] + (element * v_sd)[None, :],
        mask=exists[:, None] & (element < D)[None, :],
        other=0.0,
    )
    scores = scores_of(tl.dot(q, k, input_precision="ieee" if IEEE else "tf32"), scale, soft_cap, CAP)
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


@triton.jit  # type: ignore[untyped-decorator]
def attend_kernel(
    q_ptr: tl.tensor, k_new_ptr: tl.tensor, v_new_ptr: tl.tensor, out_ptr: tl.tensor, k_cache_ptr: tl.tensor, v_cache_ptr: tl.tensor,
    items_ptr: tl.tensor, pages_ptr: tl.tensor,
    partial_ptr: tl.tensor,  # [items, K, R, D_PAD] fp32: weighted sums of one chunk each
    state_ptr: tl.tensor,  # [items, K, 2, R] fp32: their top scores and totals
    arrived_ptr: tl.tensor,  # [items, K] int32: programs of a tile that have ended; 0 between launches
    q_st: tl.tensor, q_sh: tl.tensor, q_sd: tl.tensor, kn_st: tl.tensor, kn_sh: tl.tensor, kn_sd: tl.tensor, vn_st: tl.tensor, vn_sh: tl.tensor, vn_sd: tl.tensor,
    o_st: tl.tensor, o_sh: tl.tensor, o_sd: tl.tensor,
    kc_sp: tl.tensor, kc_st: tl.tensor, kc_sh: tl.tensor, kc_sd: tl.tensor, vc_sp: tl.tensor, vc_st: tl.tensor, vc_sh: tl.tensor, vc_sd: tl.tensor,
    scale: tl.constexpr, soft_cap: tl.constexpr,
    G: tl.constexpr, K: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, DECODE: tl.constexpr, PAGED: tl.constexpr,
    IEEE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    """Attends one tile over one chunk; in decode it appends the new token too, and takes it from k_new and v_new.

    Grid: (items, K). Strides as in `append_kernel`. With PAGED unset the keys are k_new and v_new themselves: whole
    prompts, which have no prefix.
    """
    # The last tiles of a prompt have the most keys: they begin first.
    item = tl.program_id(0) if DECODE else tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    fields = items_ptr + item * ITEM_WIDTH
    chunks = tl.load(fields + CHUNKS)
    if chunks == 0:
        return
    first_token = tl.load(fields + TOKEN).to(tl.int64)
    num_rows = tl.load(fields + NUM_ROWS)
    prefix = tl.load(fields + PREFIX)
    kv_len = tl.load(fields + KV_LEN)
    tile = tl.load(fields + TILE)
    begin = tl.load(fields + BEGIN)
    end = tl.load(fields + END)
    first = tl.load(fields + FIRST)
    pages = pages_ptr + tl.load(fields + TABLE)

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    element = tl.arange(0, D_PAD)
    q = tl.load(
        q_ptr + ((first_token + rows // G) * q_st + (kv_head * G + rows % G) * q_sh)[:, None] + element[None, :] * q_sd,
        mask=(rows < num_rows)[:, None] & (element < D)[None, :],
        other=0.0,
    )
    q_positions = prefix + rows // G
    positions = tl.arange(0, BLOCK_N)
    if PAGED:
        k_ptr = k_cache_ptr + kv_head * kc_sh
        v_ptr = v_cache_ptr + kv_head * vc_sh
    else:
        k_ptr = k_new_ptr + first_token * kn_st + kv_head * kn_sh
        v_ptr = v_new_ptr + first_token * vn_st + kv_head * vn_sh
    k_st = kc_st if PAGED else kn_st
    k_sd = kc_sd if PAGED else kn_sd
    v_st = vc_st if PAGED else vn_st
    v_sd = vc_sd if PAGED else vn_sd

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    if DECODE:
        # The chunk with the new token's position writes it, and begins its sums with it instead of reading it back.
        slot = tl.load(fields + SLOT).to(tl.int64)
        if (end == kv_len) & (slot >= 0):
            end -= 1
            inside = element < D
            k_new = tl.load(k_new_ptr + first_token * kn_st + kv_head * kn_sh + element * kn_sd, mask=inside, other=0.0)
            v_new = tl.load(v_new_ptr + first_token * vn_st + kv_head * vn_sh + element * vn_sd, mask=inside, other=0.0)
            page = slot // PAGE_SIZE
            place = slot % PAGE_SIZE
            tl.store(k_ptr + page * kc_sp + place * kc_st + element * kc_sd, k_new, mask=inside)
            tl.store(v_ptr + page * vc_sp + place * vc_st + element * vc_sd, v_new, mask=inside)
            products = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1)
            top = scores_of(products, scale, soft_cap, CAP)
            total = tl.full([BLOCK_M], 1.0, tl.float32)
            acc = tl.zeros([BLOCK_M, D_PAD], tl.float32) + v_new.to(tl.float32)[None, :]
        for start in range(begin, end, BLOCK_N):
            acc, top, total = attend_tile(
                acc, top, total, q, positions, start, end, q_positions, k_ptr, v_ptr, pages, kc_sp, k_st, k_sd,
                vc_sp, v_st, v_sd, scale, soft_cap, D, D_PAD, PAGE_SIZE, 0, CAP, False, PAGED, IEEE,
            )  # fmt: skip
    else:
        lowest = prefix + tile * BLOCK_M // G
        end = tl.minimum(end, prefix + (tl.minimum(tile * BLOCK_M + BLOCK_M, num_rows) - 1) // G + 1)
        if WINDOW > 0:
            begin = tl.maximum(begin, lowest - WINDOW + 1)
            whole = begin
        else:
            # Tiles of keys that every row sees need no causal mask.
            whole = begin + tl.maximum(tl.minimum(end, lowest + 1) - begin, 0) // BLOCK_N * BLOCK_N
        for start in range(begin, whole, BLOCK_N):
            acc, top, total = attend_tile(
                acc, top, total, q, positions, start, end, q_positions, k_ptr, v_ptr, pages, kc_sp, k_st, k_sd,
                vc_sp, v_st, v_sd, scale, soft_cap, D, D_PAD, PAGE_SIZE, 0, CAP, False, PAGED, IEEE,
            )  # fmt: skip
        for start in range(whole, end, BLOCK_N):
            acc, top, total = attend_tile(
                acc, top, total, q, positions, start, end, q_positions, k_ptr, v_ptr, pages, kc_sp, k_st, k_sd,
                vc_sp, v_st, v_sd, scale, soft_cap, D, D_PAD, PAGE_SIZE, WINDOW, CAP, True, PAGED, IEEE,
            )  # fmt: skip

    if chunks == 1:
        # total is 0 only for a row without any key, whose output is 0.
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out_ptr + ((first_token + rows // G) * o_st + (kv_head * G + rows % G) * o_sh)[:, None]
            + element[None, :] * o_sd,
            result.to(out_ptr.dtype.element_ty),
            mask=(rows < num_rows)[:, None] & (element < D)[None, :],
        )  # fmt: skip
        return

    place = item * K + kv_head
    kept = tl.arange(0, BLOCK_M)
    tl.store(
        partial_ptr + (place * R + kept)[:, None] * D_PAD + element[None, :], acc, mask=(kept < R)[:, None]
    )
    tl.store(state_ptr + place * 2 * R + kept, top, mask=kept < R)
    tl.store(state_ptr + (place * 2 + 1) * R + kept, total, mask=kept < R)
    # All threads' stores come before the program's arrival, and the last one's reads after it.
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + first * K + kv_head, 1, sem="acq_rel", scope="gpu") < chunks - 1:
        return
    combine(
        out_ptr, partial_ptr, state_ptr, first, chunks, kv_head, first_token, tile, num_rows, o_st, o_sh, o_sd,
        G, K, D, D_PAD, BLOCK_M, R, BLOCK_C,
    )  # fmt: skip
    tl.store(arrived_ptr + first * K + kv_head, 0)


@triton.jit  # type: ignore[untyped-decorator]
def combine(
    out_ptr: tl.tensor, partial_ptr: tl.tensor, state_ptr: tl.tensor, first: tl.tensor, chunks: tl.tensor, kv_head: tl.tensor,
    first_token: tl.tensor, tile: tl.tensor, num_rows: tl.tensor, o_st: tl.tensor, o_sh: tl.tensor, o_sd: tl.tensor,
    G: tl.constexpr, K: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, R: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    """Adds up the chunks of one tile, always in their order, and writes its output.

    Reads bypass the first-level cache (`.cg`): the partial sums were written by other multiprocessors.
    """
    kept = tl.arange(0, R)
    element = tl.arange(0, D_PAD)
    top = tl.full([R], float("-inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, D_PAD], tl.float32)
    for start in range(0, chunks, BLOCK_C):
        number = start + tl.arange(0, BLOCK_C)
        exists = number < chunks
        place = (first + number).to(tl.int64) * K + kv_head
        state = state_ptr + place[:, None] * 2 * R + kept[None, :]
        tops = tl.load(state, mask=exists[:, None], other=float("-inf"), cache_modifier=".cg")  # [C, R]
        totals = tl.load(state + R, mask=exists[:, None], other=0.0, cache_modifier=".cg")
        sums = tl.load(
            partial_ptr + ((place[:, None] * R + kept[None, :]) * D_PAD)[:, :, None] + element[None, None, :],
            mask=exists[:, None, None],
            other=0.0,
            cache_modifier=".cg",
        )  # [C, R, D]
        new_top = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        weights = tl.exp2(tops - base[None, :])
        acc = acc * shrink[:, None] + tl.sum(sums * weights[:, :, None], 0)
        total = total * shrink + tl.sum(totals * weights, 0)
        top = new_top
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    rows = tile * BLOCK_M + kept
    tl.store(
        out_ptr + ((first_token + rows // G) * o_st + (kv_head * G + rows % G) * o_sh)[:, None]
        + element[None, :] * o_sd,
        result.to(out_ptr.dtype.element_ty),
        mask=(rows < num_rows)[:, None] & (element < D)[None, :],
    )  # fmt: skip
