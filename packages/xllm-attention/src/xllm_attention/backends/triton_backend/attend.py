"""The attention kernel: one program an item of the work list and kv head. Owns what a program does, start to end.

Legend as in `tile`; also K kv heads, C chunks. A query row is one token and one head of the group.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .tile import add_tile, row_pointers
from .worklist import BEGIN, CHUNKS, END, FIRST, ITEM_WIDTH, KV_LEN, NUM_ROWS, PREFIX, SLOT, TABLE, TILE, TOKEN


@triton.jit  # type: ignore[untyped-decorator]
def attend_kernel(
    q_ptr: tl.tensor, k_new_ptr: tl.tensor, v_new_ptr: tl.tensor, out_ptr: tl.tensor, k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor, items_ptr: tl.tensor, pages_ptr: tl.tensor,
    partial_ptr: tl.tensor,  # [items, K, R, D_PAD] fp32: weighted sums of one chunk each
    state_ptr: tl.tensor,  # [items, K, 2, R] fp32: their top scores and totals
    arrived_ptr: tl.tensor,  # [items, K] int32: programs of a tile that have ended; 0 between launches
    q_st: tl.tensor, q_sh: tl.tensor, q_sd: tl.tensor, kn_st: tl.tensor, kn_sh: tl.tensor, kn_sd: tl.tensor,
    vn_st: tl.tensor, vn_sh: tl.tensor, vn_sd: tl.tensor, o_st: tl.tensor, o_sh: tl.tensor, o_sd: tl.tensor,
    kc_sp: tl.tensor, kc_st: tl.tensor, kc_sh: tl.tensor, kc_sd: tl.tensor, vc_sp: tl.tensor, vc_st: tl.tensor,
    vc_sh: tl.tensor, vc_sd: tl.tensor,
    scale: tl.constexpr, soft_cap: tl.constexpr,
    G: tl.constexpr, K: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, DECODE: tl.constexpr, PAGED: tl.constexpr,
    IEEE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, R: tl.constexpr,
    BLOCK_C: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Attends one tile over one chunk; in decode it appends the new token too, taking it from k_new and v_new.

    Grid: (items, K). Strides as in `append_kernel`. With PAGED unset the keys are k_new and v_new themselves: whole
    prompts, which have no prefix.
    """
    if PDL:
        gdc_launch_dependents()
    # The last tiles of a prompt have the most keys: they begin first.
    item = tl.program_id(0) if DECODE else tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
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
        gdc_wait()
    if chunks == 0:
        return

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    element = tl.arange(0, D_PAD)
    q = tl.load(
        q_ptr + ((first_token + rows // G) * q_st + (kv_head * G + rows % G) * q_sh)[:, None] + element[None, :] * q_sd,
        mask=(rows < num_rows)[:, None] & (element < D)[None, :],
        other=0.0,
    )
    q_positions = prefix + rows // G
    k_new = k_new_ptr + first_token * kn_st + kv_head * kn_sh
    v_new = v_new_ptr + first_token * vn_st + kv_head * vn_sh
    k_base = k_cache_ptr + kv_head * kc_sh if PAGED else k_new
    v_base = v_cache_ptr + kv_head * vc_sh if PAGED else v_new
    k_st = kc_st if PAGED else kn_st
    v_st = vc_st if PAGED else vn_st
    k_sd = kc_sd if PAGED else kn_sd
    v_sd = vc_sd if PAGED else vn_sd
    positions = tl.arange(0, BLOCK_N)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    # Two loops: plain tiles of keys, then those that need a mask or, in decode, the one with the new token's key. A
    # choice of pointers costs the plain loop a tenth of its bandwidth.
    if DECODE:
        appends = (end == kv_len) & (slot >= 0)
        whole = tl.where(appends, begin + (end - 1 - begin) // BLOCK_N * BLOCK_N, end)
    else:
        lowest = prefix + tile * BLOCK_M // G
        end = tl.minimum(end, prefix + (tl.minimum(tile * BLOCK_M + BLOCK_M, num_rows) - 1) // G + 1)
        if WINDOW > 0:
            begin = tl.maximum(begin, lowest - WINDOW + 1)
            whole = begin
        else:
            whole = begin + tl.maximum(tl.minimum(end, lowest + 1) - begin, 0) // BLOCK_N * BLOCK_N
    for start in range(begin, whole, BLOCK_N):
        key = start + positions
        exists = key < end
        k_rows, v_rows = row_pointers(
            key, exists, k_base, v_base, k_new, v_new, pages, kc_sp, k_st, vc_sp, v_st, -1, PAGE_SIZE, PAGED, False,
        )  # fmt: skip
        acc, top, total = add_tile(
            acc, top, total, q, key, exists, q_positions, k_rows, v_rows, k_sd, v_sd, scale, soft_cap,
            D, D_PAD, 0, CAP, False, IEEE,
        )  # fmt: skip
    for start in range(whole, end, BLOCK_N):
        key = start + positions
        exists = key < end
        k_rows, v_rows = row_pointers(
            key, exists, k_base, v_base, k_new, v_new, pages, kc_sp, k_st, vc_sp, v_st, kv_len - 1,
            PAGE_SIZE, PAGED, DECODE,
        )  # fmt: skip
        acc, top, total = add_tile(
            acc, top, total, q, key, exists, q_positions, k_rows, v_rows, k_sd, v_sd, scale, soft_cap,
            D, D_PAD, 0 if DECODE else WINDOW, CAP, not DECODE, IEEE,
        )  # fmt: skip

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

    if DECODE and appends:
        # The program that had the new token's position appends it; no other program of this launch reads that slot.
        inside = element < D
        page = slot // PAGE_SIZE
        within = slot % PAGE_SIZE
        k_row = tl.load(k_new + element * kn_sd, mask=inside, other=0.0)
        v_row = tl.load(v_new + element * vn_sd, mask=inside, other=0.0)
        tl.store(k_base + page * kc_sp + within * kc_st + element * kc_sd, k_row, mask=inside)
        tl.store(v_base + page * vc_sp + within * vc_st + element * vc_sd, v_row, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def combine(
    out_ptr: tl.tensor, partial_ptr: tl.tensor, state_ptr: tl.tensor, first: tl.tensor, chunks: tl.tensor,
    kv_head: tl.tensor, first_token: tl.tensor, tile: tl.tensor, num_rows: tl.tensor, o_st: tl.tensor, o_sh: tl.tensor,
    o_sd: tl.tensor,
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
    outputs = out_ptr + ((first_token + rows // G) * o_st + (kv_head * G + rows % G) * o_sh)[:, None]
    tl.store(
        outputs + element[None, :] * o_sd,
        result.to(out_ptr.dtype.element_ty),
        mask=(rows < num_rows)[:, None] & (element < D)[None, :],
    )
