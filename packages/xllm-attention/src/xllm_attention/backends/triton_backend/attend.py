"""The attention kernel: a program attends items of the work list for one kv head. Owns what it does, start to end.

Legend as in `tile`; also K kv heads, C chunks. A query row is one token and one head of the group.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .tile import add_tile, scores_of
from .worklist import (
    BEGIN,
    CHUNKS,
    EMPTY_BEGIN,
    EMPTY_END,
    END,
    FIRST,
    ITEM_WIDTH,
    KV_LEN,
    NUM_ROWS,
    PREFIX,
    RUN_BEGIN,
    RUN_END,
    SLOT,
    TABLE,
    TILE,
    TOKEN,
)


@triton.jit  # type: ignore[untyped-decorator]
def attend_kernel(
    q_ptr: tl.tensor, k_new_ptr: tl.tensor, v_new_ptr: tl.tensor, out_ptr: tl.tensor, k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor, items_ptr: tl.tensor, pages_ptr: tl.tensor,
    partial_ptr: tl.tensor,  # [items, K, R, D_PAD] fp32: weighted sums of one chunk each
    state_ptr: tl.tensor,  # [items, K, 2, R] fp32: their top scores and totals
    arrived_ptr: tl.tensor,  # [items, K] int32: programs of a tile that have ended; 0 between launches
    STRIDES: tl.constexpr,  # q, k_new, v_new, out (token, head, element), caches (page, place, head, element)
    scale: tl.constexpr, soft_cap: tl.constexpr,
    G: tl.constexpr, K: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, DECODE: tl.constexpr, PAGED: tl.constexpr,
    IEEE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, R: tl.constexpr,
    BLOCK_C: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Attends the items of one program, in decode a run of them and some without keys, which write zeros.

    Grid: (K, programs): programs without items come last. With PAGED unset the keys are k_new and v_new themselves:
    whole prompts, which have no prefix.
    """
    kv_head = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    if DECODE:
        fields = items_ptr + program * ITEM_WIDTH
        begin = tl.load(fields + RUN_BEGIN)
        count = tl.load(fields + RUN_END) - begin
        empty_begin = tl.load(fields + EMPTY_BEGIN)
        num_empty = tl.load(fields + EMPTY_END) - empty_begin
        for number in range(count + num_empty):
            item = tl.where(number < count, begin + number, empty_begin + number - count)
            attend_item(
                q_ptr, k_new_ptr, v_new_ptr, out_ptr, k_cache_ptr, v_cache_ptr, items_ptr, pages_ptr, partial_ptr,
                state_ptr, arrived_ptr, item, kv_head, STRIDES, scale, soft_cap, G, K, D, D_PAD, PAGE_SIZE, WINDOW,
                CAP, DECODE, PAGED, IEEE, BLOCK_M, BLOCK_N, R, BLOCK_C, PDL,
            )  # fmt: skip
    else:
        # The last tiles of a prompt have the most keys: they begin first.
        item = tl.num_programs(1) - 1 - program
        if tl.load(items_ptr + item * ITEM_WIDTH + CHUNKS) > 0:
            attend_item(
                q_ptr, k_new_ptr, v_new_ptr, out_ptr, k_cache_ptr, v_cache_ptr, items_ptr, pages_ptr, partial_ptr,
                state_ptr, arrived_ptr, item, kv_head, STRIDES, scale, soft_cap, G, K, D, D_PAD, PAGE_SIZE, WINDOW,
                CAP, DECODE, PAGED, IEEE, BLOCK_M, BLOCK_N, R, BLOCK_C, PDL,
            )  # fmt: skip
    if PDL:
        # Programs without items too: a launch that has ended must mean that all before it have.
        gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def attend_item(
    q_ptr: tl.tensor, k_new_ptr: tl.tensor, v_new_ptr: tl.tensor, out_ptr: tl.tensor, k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor, items_ptr: tl.tensor, pages_ptr: tl.tensor, partial_ptr: tl.tensor, state_ptr: tl.tensor,
    arrived_ptr: tl.tensor, item: tl.tensor, kv_head: tl.tensor,
    STRIDES: tl.constexpr, scale: tl.constexpr, soft_cap: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    DECODE: tl.constexpr, PAGED: tl.constexpr, IEEE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Attends one tile over one chunk; in decode it appends the new token too, taking it from k_new and v_new."""
    q_st, q_sh, q_sd = STRIDES[0], STRIDES[1], STRIDES[2]
    kn_st, kn_sh, kn_sd = STRIDES[3], STRIDES[4], STRIDES[5]
    vn_st, vn_sh, vn_sd = STRIDES[6], STRIDES[7], STRIDES[8]
    o_st, o_sh, o_sd = STRIDES[9], STRIDES[10], STRIDES[11]
    kc_sp, kc_st, kc_sh, kc_sd = STRIDES[12], STRIDES[13], STRIDES[14], STRIDES[15]
    vc_sp, vc_st, vc_sh, vc_sd = STRIDES[16], STRIDES[17], STRIDES[18], STRIDES[19]
    fields = items_ptr + item * ITEM_WIDTH
    chunks = tl.load(fields + CHUNKS)
    first_token = tl.load(fields + TOKEN).to(tl.int64)
    num_rows = tl.load(fields + NUM_ROWS)
    prefix = tl.load(fields + PREFIX)
    kv_len = tl.load(fields + KV_LEN)
    tile = tl.load(fields + TILE)
    begin = tl.load(fields + BEGIN)
    end = tl.load(fields + END)
    first = tl.load(fields + FIRST)
    pages = pages_ptr + tl.load(fields + TABLE)
    slot = tl.load(fields + SLOT).to(tl.int64)
    if PDL:
        # What earlier launches of the step write is read below only. Waiting again, at a later item, costs nothing.
        gdc_wait()
        gdc_launch_dependents()

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    element = tl.arange(0, D_PAD)
    q = tl.load(
        q_ptr + ((first_token + rows // G) * q_st + (kv_head * G + rows % G) * q_sh)[:, None] + element[None, :] * q_sd,
        mask=(rows < num_rows)[:, None] & (element < D)[None, :],
        other=0.0,
    )
    if DECODE:
        # Not to wait here, but to have the queries on their way: else the compiler asks for them once the first page's
        # number is there, and the first keys wait for both, one after the other.
        tl.debug_barrier()
    q_positions = prefix + rows // G
    k_row = k_new_ptr + first_token * kn_st + kv_head * kn_sh
    v_row = v_new_ptr + first_token * vn_st + kv_head * vn_sh
    k_base = k_cache_ptr + kv_head * kc_sh if PAGED else k_row
    v_base = v_cache_ptr + kv_head * vc_sh if PAGED else v_row
    k_st = kc_st if PAGED else kn_st
    v_st = vc_st if PAGED else vn_st
    k_sd = kc_sd if PAGED else kn_sd
    v_sd = vc_sd if PAGED else vn_sd
    positions = tl.arange(0, BLOCK_N)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    whole = end
    if DECODE:
        # The program whose chunk ends with the new token appends it, and adds it at the end without reading it back;
        # a slot below 0 says that the cache has it already. Its loads are under way while the others are added.
        appends = (end == kv_len) & (slot >= 0)
        whole = tl.where(appends, end - 1, end)
        appended = element < tl.where(appends, D, 0)
        k_new = tl.load(k_row + element * kn_sd, mask=appended, other=0.0)
        v_new = tl.load(v_row + element * vn_sd, mask=appended, other=0.0)
        end = whole
    else:
        lowest = prefix + tile * BLOCK_M // G
        end = tl.minimum(end, prefix + (tl.minimum(tile * BLOCK_M + BLOCK_M, num_rows) - 1) // G + 1)
        if WINDOW > 0:
            begin = tl.maximum(begin, lowest - WINDOW + 1)
            whole = begin
        else:
            # Tiles of keys that every row sees need no mask.
            whole = begin + tl.maximum(tl.minimum(end, lowest + 1) - begin, 0) // BLOCK_N * BLOCK_N
    for start in range(begin, whole, BLOCK_N):
        acc, top, total = add_tile(
            acc, top, total, q, start + positions, end, q_positions, k_base, v_base, pages, kc_sp, k_st, k_sd,
            vc_sp, v_st, v_sd, scale, soft_cap, D, D_PAD, PAGE_SIZE, PAGED, 0, CAP, False, IEEE,
        )  # fmt: skip
    if not DECODE:
        for start in range(whole, end, BLOCK_N):
            acc, top, total = add_tile(
                acc, top, total, q, start + positions, end, q_positions, k_base, v_base, pages, kc_sp, k_st, k_sd,
                vc_sp, v_st, v_sd, scale, soft_cap, D, D_PAD, PAGE_SIZE, PAGED, WINDOW, CAP, True, IEEE,
            )  # fmt: skip
    elif appends:
        page = slot // PAGE_SIZE
        within = slot % PAGE_SIZE
        tl.store(k_base + page * kc_sp + within * kc_st + element * kc_sd, k_new, mask=appended)
        tl.store(v_base + page * vc_sp + within * vc_st + element * vc_sd, v_new, mask=appended)
        score = scores_of(tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1), scale, soft_cap, CAP)
        new_top = tl.maximum(top, score)
        shrink = tl.exp2(top - new_top)
        weight = tl.exp2(score - new_top)
        acc = acc * shrink[:, None] + weight[:, None] * v_new.to(tl.float32)[None, :]
        total = total * shrink + weight
        top = new_top
    outputs = out_ptr + ((first_token + rows // G) * o_st + (kv_head * G + rows % G) * o_sh)[:, None]
    outputs += element[None, :] * o_sd
    written = (rows < num_rows)[:, None] & (element < D)[None, :]
    if chunks == 1:
        # total is 0 only for a row without any key, whose output is 0.
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(outputs, result.to(out_ptr.dtype.element_ty), mask=written)
    else:
        place = item * K + kv_head
        kept = tl.arange(0, BLOCK_M)
        tl.store(partial_ptr + (place * R + kept)[:, None] * D_PAD + element[None, :], acc, mask=(kept < R)[:, None])
        tl.store(state_ptr + place * 2 * R + kept, top, mask=kept < R)
        tl.store(state_ptr + (place * 2 + 1) * R + kept, total, mask=kept < R)
        # All threads' stores come before the program's arrival, and the last one's reads after it.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrived_ptr + first * K + kv_head, 1, sem="acq_rel", scope="gpu")
        if arrived == chunks - 1:
            combine(
                out_ptr, partial_ptr, state_ptr, first, chunks, kv_head, first_token, tile, num_rows,
                o_st, o_sh, o_sd, G, K, D, D_PAD, BLOCK_M, R, BLOCK_C,
            )  # fmt: skip
            tl.store(arrived_ptr + first * K + kv_head, 0)


@triton.jit  # type: ignore[untyped-decorator]
def combine(
    out_ptr: tl.tensor, partial_ptr: tl.tensor, state_ptr: tl.tensor, first: tl.tensor, chunks: tl.tensor,
    kv_head: tl.tensor, first_token: tl.tensor, tile: tl.tensor, num_rows: tl.tensor, o_st: tl.tensor, o_sh: tl.tensor,
    o_sd: tl.tensor,
    G: tl.constexpr, K: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, R: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    """Adds up the chunks of one tile, always in their order, and writes its output.

    One axis of R * D columns, so that no thread needs what another one has read. Reads bypass the first-level cache
    (`.cg`): the partial sums were written by other multiprocessors.
    """
    column = tl.arange(0, R * D_PAD)
    kept = column // D_PAD
    element = column % D_PAD
    top = tl.full([R * D_PAD], float("-inf"), tl.float32)
    total = tl.zeros([R * D_PAD], tl.float32)
    acc = tl.zeros([R * D_PAD], tl.float32)
    for start in range(0, chunks, BLOCK_C):
        new_top = top
        for number in tl.static_range(BLOCK_C):
            place = (first + start + number).to(tl.int64) * K + kv_head
            exists = kept < tl.where(start + number < chunks, R, 0)
            state = state_ptr + place * 2 * R + kept
            new_top = tl.maximum(new_top, tl.load(state, mask=exists, other=float("-inf"), cache_modifier=".cg"))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        acc *= shrink
        total *= shrink
        top = new_top
        for number in tl.static_range(BLOCK_C):
            place = (first + start + number).to(tl.int64) * K + kv_head
            exists = kept < tl.where(start + number < chunks, R, 0)
            state = state_ptr + place * 2 * R + kept
            weight = tl.exp2(tl.load(state, mask=exists, other=float("-inf"), cache_modifier=".cg") - base)
            total += weight * tl.load(state + R, mask=exists, other=0.0, cache_modifier=".cg")
            acc += weight * tl.load(
                partial_ptr + place * (R * D_PAD) + column, mask=exists, other=0.0, cache_modifier=".cg"
            )
    result = acc / tl.where(total == 0.0, 1.0, total)
    row = tile * BLOCK_M + kept
    tl.store(
        out_ptr + (first_token + row // G) * o_st + (kv_head * G + row % G) * o_sh + element * o_sd,
        result.to(out_ptr.dtype.element_ty),
        mask=(row < num_rows) & (element < D),
    )
