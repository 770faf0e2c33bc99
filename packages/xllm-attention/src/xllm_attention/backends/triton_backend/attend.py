"""The split-KV attention kernel: each program attends items of the work list for one KV head.

Legend as in `tile`; also K KV heads, G query heads per KV head. A query row is one token and one head of the group. In
decode the kernel also appends the new token to the cache. Programs that share a tile leave partial results in the
workspace, and the last one to finish combines them, or `combine_kernel` for latent layers.

A latent layer has REST > 0. Its keys are [D value elements, REST others], and no value is read. K are blocks of G of
its query heads then, and BLOCKS such blocks share the keys of one KV head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .combine import combine
from .fp8 import from_fp8, to_fp8
from .tile import LOG2_E, add_tile, append_latent, scores_of, without_bad_values
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


@triton.jit(do_not_specialize_on_alignment=["sinks_ptr"])  # type: ignore[untyped-decorator]
def attend_kernel(
    q_ptr: tl.tensor, k_new_ptr: tl.tensor, v_new_ptr: tl.tensor, out_ptr: tl.tensor, k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor, items_ptr: tl.tensor, pages_ptr: tl.tensor,
    partial_ptr: tl.tensor,  # [items, K, R, D_PAD] fp32: unnormalized output of one chunk
    state_ptr: tl.tensor,  # [items, K, 2, R] fp32: its softmax state, row_max and row_sum
    # [items, K] int32: finished chunks of a tile; 0 between launches. In a latent layer [num_seqs]: the first item of
    # each sequence, which the kernel writes in decode.
    arrived_ptr: tl.tensor,
    sinks_ptr: tl.tensor,  # [H]; read with SINKS only
    k_scale: tl.tensor, v_scale: tl.tensor,  # of fp8 caches; None: the caches have the dtype of q
    Q_STRIDES: tl.constexpr, K_NEW_STRIDES: tl.constexpr, V_NEW_STRIDES: tl.constexpr, OUT_STRIDES: tl.constexpr,
    K_CACHE_STRIDES: tl.constexpr, V_CACHE_STRIDES: tl.constexpr,
    scale: tl.constexpr, soft_cap: tl.constexpr,
    G: tl.constexpr, K: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, REST: tl.constexpr,
    REST_PAD: tl.constexpr, BLOCKS: tl.constexpr, DECODE: tl.constexpr, PAGED: tl.constexpr, IEEE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Attends the items of one program.

    In decode a program has a run of items with keys, then some without keys, whose output is 0. In other steps it has
    one item. Grid: (K, programs); programs without items come last. Without PAGED the keys are k_new and v_new: whole
    prompts, which have no prefix. Strides in elements: (token, head, dim), of caches (page, slot, head, dim).
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
                state_ptr, arrived_ptr, sinks_ptr, k_scale, v_scale, item, kv_head, Q_STRIDES, K_NEW_STRIDES,
                V_NEW_STRIDES, OUT_STRIDES, K_CACHE_STRIDES, V_CACHE_STRIDES, scale, soft_cap, G, K, D, D_PAD,
                PAGE_SIZE, WINDOW, CAP, SINKS, REST, REST_PAD, BLOCKS, DECODE, PAGED, IEEE, BLOCK_M, BLOCK_N, R,
                BLOCK_C, PDL,
            )  # fmt: skip
    else:
        # The last tiles of a prompt have the most keys, so they start first.
        item = tl.num_programs(1) - 1 - program
        if tl.load(items_ptr + item * ITEM_WIDTH + CHUNKS) > 0:
            attend_item(
                q_ptr, k_new_ptr, v_new_ptr, out_ptr, k_cache_ptr, v_cache_ptr, items_ptr, pages_ptr, partial_ptr,
                state_ptr, arrived_ptr, sinks_ptr, k_scale, v_scale, item, kv_head, Q_STRIDES, K_NEW_STRIDES,
                V_NEW_STRIDES, OUT_STRIDES, K_CACHE_STRIDES, V_CACHE_STRIDES, scale, soft_cap, G, K, D, D_PAD,
                PAGE_SIZE, WINDOW, CAP, SINKS, REST, REST_PAD, BLOCKS, DECODE, PAGED, IEEE, BLOCK_M, BLOCK_N, R,
                BLOCK_C, PDL,
            )  # fmt: skip
    if PDL:
        # Programs without items wait too: the end of this launch must imply the end of all launches before it.
        gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def attend_item(
    q_ptr: tl.tensor, k_new_ptr: tl.tensor, v_new_ptr: tl.tensor, out_ptr: tl.tensor, k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor, items_ptr: tl.tensor, pages_ptr: tl.tensor, partial_ptr: tl.tensor, state_ptr: tl.tensor,
    arrived_ptr: tl.tensor, sinks_ptr: tl.tensor, k_scale: tl.tensor, v_scale: tl.tensor, item: tl.tensor,
    kv_head: tl.tensor,
    Q_STRIDES: tl.constexpr, K_NEW_STRIDES: tl.constexpr, V_NEW_STRIDES: tl.constexpr, OUT_STRIDES: tl.constexpr,
    K_CACHE_STRIDES: tl.constexpr, V_CACHE_STRIDES: tl.constexpr, scale: tl.constexpr, soft_cap: tl.constexpr,
    G: tl.constexpr, K: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr,
    BLOCKS: tl.constexpr,
    DECODE: tl.constexpr, PAGED: tl.constexpr, IEEE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Attends one tile of query rows over one chunk of keys. In decode it also appends k_new and v_new to the cache."""
    # By index: Triton 3.6 does not unpack a tuple that is a constexpr.
    q_stride_token, q_stride_head, q_stride_dim = Q_STRIDES[0], Q_STRIDES[1], Q_STRIDES[2]
    k_new_stride_token, k_new_stride_head, k_new_stride_dim = K_NEW_STRIDES[0], K_NEW_STRIDES[1], K_NEW_STRIDES[2]
    v_new_stride_token, v_new_stride_head, v_new_stride_dim = V_NEW_STRIDES[0], V_NEW_STRIDES[1], V_NEW_STRIDES[2]
    out_stride_token, out_stride_head, out_stride_dim = OUT_STRIDES[0], OUT_STRIDES[1], OUT_STRIDES[2]
    k_cache_stride_page, k_cache_stride_slot = K_CACHE_STRIDES[0], K_CACHE_STRIDES[1]
    k_cache_stride_head, k_cache_stride_dim = K_CACHE_STRIDES[2], K_CACHE_STRIDES[3]
    v_cache_stride_page, v_cache_stride_slot = V_CACHE_STRIDES[0], V_CACHE_STRIDES[1]
    v_cache_stride_head, v_cache_stride_dim = V_CACHE_STRIDES[2], V_CACHE_STRIDES[3]
    FP8: tl.constexpr = k_scale is not None
    # Keys are scaled with the scores, values with the output: no element of the cache is multiplied.
    score_scale = scale * k_scale if FP8 else scale
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
        # The loads above read the work list only. What earlier launches of the step write is read below. Waiting
        # again, at a later item, costs nothing.
        gdc_wait()
        gdc_launch_dependents()

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    element = tl.arange(0, D_PAD)
    q_rows = q_ptr + ((first_token + rows // G) * q_stride_token + (kv_head * G + rows % G) * q_stride_head)[:, None]
    q = tl.load(
        q_rows + element[None, :] * q_stride_dim, mask=(rows < num_rows)[:, None] & (element < D)[None, :], other=0.0
    )
    q_rest = q
    rest = tl.arange(0, REST_PAD)
    if REST > 0:
        rest_mask = (rows < num_rows)[:, None] & (rest < REST)[None, :]
        q_rest = tl.load(q_rows + (D + rest)[None, :] * q_stride_dim, mask=rest_mask, other=0.0)
    if DECODE:
        # Issues the loads of the queries here. Without the barrier the compiler moves them after the load of the first
        # page index, and the first keys wait for both loads, one after the other.
        tl.debug_barrier()
    q_positions = prefix + rows // G
    key_head = kv_head // BLOCKS
    k_row = k_new_ptr + first_token * k_new_stride_token + key_head * k_new_stride_head
    v_row = v_new_ptr + first_token * v_new_stride_token + key_head * v_new_stride_head
    k_base = k_cache_ptr + key_head * k_cache_stride_head if PAGED else k_row
    v_base = v_cache_ptr + key_head * v_cache_stride_head if PAGED else v_row
    k_stride_token = k_cache_stride_slot if PAGED else k_new_stride_token
    v_stride_token = v_cache_stride_slot if PAGED else v_new_stride_token
    k_stride_dim = k_cache_stride_dim if PAGED else k_new_stride_dim
    v_stride_dim = v_cache_stride_dim if PAGED else v_new_stride_dim
    positions = tl.arange(0, BLOCK_N)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    if SINKS:
        # A sink is a score without a value. It enters in one chunk of the tile: the first.
        sinks = tl.load(sinks_ptr + kv_head * G + rows % G).to(tl.float32) * LOG2_E
        row_max = tl.where(item == first, sinks, row_max)
        row_sum = tl.where(item == first, 1.0, row_sum)
    unmasked_end = end
    if DECODE and REST > 0:
        if item == first:
            tl.store(arrived_ptr + first_token, item)
        # All blocks of heads write the same bytes. The barrier makes them visible to the loads of this program.
        if (end == kv_len) & (slot >= 0):
            append_latent(
                k_row, k_base + slot // PAGE_SIZE * k_cache_stride_page + slot % PAGE_SIZE * k_cache_stride_slot,
                k_new_stride_dim, k_cache_stride_dim, D, D_PAD, REST, REST_PAD,
            )  # fmt: skip
            tl.debug_barrier()
    elif DECODE:
        # The program whose chunk ends with the new token appends it, and adds it after all other keys, without reading
        # it back. A slot below 0 means that the cache already holds it. The loads here overlap with the loop below.
        appends = (end == kv_len) & (slot >= 0)
        unmasked_end = tl.where(appends, end - 1, end)
        appended = element < tl.where(appends, D, 0)
        k_new = tl.load(k_row + element * k_new_stride_dim, mask=appended, other=0.0)
        v_new = tl.load(v_row + element * v_new_stride_dim, mask=appended, other=0.0)
        end = unmasked_end
    else:
        first_position = prefix + tile * BLOCK_M // G
        end = tl.minimum(end, prefix + (tl.minimum(tile * BLOCK_M + BLOCK_M, num_rows) - 1) // G + 1)
        if WINDOW > 0:
            begin = tl.maximum(begin, first_position - WINDOW + 1)
            unmasked_end = begin
        else:
            # Tiles of keys that every query row sees need no causal mask.
            unmasked_end = begin + tl.maximum(tl.minimum(end, first_position + 1) - begin, 0) // BLOCK_N * BLOCK_N
    for start in range(begin, unmasked_end, BLOCK_N):
        acc, row_max, row_sum = add_tile(
            acc, row_max, row_sum, q, q_rest, start + positions, end, q_positions, k_base, v_base, pages,
            k_cache_stride_page, k_stride_token, k_stride_dim, v_cache_stride_page, v_stride_token, v_stride_dim,
            score_scale, soft_cap, D, D_PAD, PAGE_SIZE, PAGED, 0, CAP, False, IEEE, REST, REST_PAD, FP8,
        )  # fmt: skip
    if not DECODE:
        for start in range(unmasked_end, end, BLOCK_N):
            acc, row_max, row_sum = add_tile(
                acc, row_max, row_sum, q, q_rest, start + positions, end, q_positions, k_base, v_base, pages,
                k_cache_stride_page, k_stride_token, k_stride_dim, v_cache_stride_page, v_stride_token, v_stride_dim,
                score_scale, soft_cap, D, D_PAD, PAGE_SIZE, PAGED, WINDOW, CAP, True, IEEE, REST, REST_PAD, FP8,
            )  # fmt: skip
    elif REST == 0 and appends:
        page = slot // PAGE_SIZE
        page_slot = slot % PAGE_SIZE
        k_target = k_base + page * k_cache_stride_page + page_slot * k_cache_stride_slot
        k_new, v_new, _ = without_bad_values(k_new, v_new)
        if FP8:
            k_new, v_new = to_fp8(k_new, k_scale), to_fp8(v_new, v_scale)
        tl.store(k_target + element * k_cache_stride_dim, k_new, mask=appended)
        v_target = v_base + page * v_cache_stride_page + page_slot * v_cache_stride_slot
        tl.store(v_target + element * v_cache_stride_dim, v_new, mask=appended)
        if FP8:
            k_new, v_new = from_fp8(k_new, q), from_fp8(v_new, q)
        score = scores_of(tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1), score_scale, soft_cap, CAP)
        new_max = tl.maximum(row_max, score)
        rescale = tl.exp2(row_max - new_max)
        weight = tl.exp2(score - new_max)
        acc = acc * rescale[:, None] + weight[:, None] * v_new.to(tl.float32)[None, :]
        row_sum = row_sum * rescale + weight
        row_max = new_max
    if FP8:
        acc *= v_scale
    outputs = (
        out_ptr + ((first_token + rows // G) * out_stride_token + (kv_head * G + rows % G) * out_stride_head)[:, None]
    )
    outputs += element[None, :] * out_stride_dim
    in_tile = (rows < num_rows)[:, None] & (element < D)[None, :]
    if chunks == 1:
        # row_sum is 0 only for a row without keys, whose output is 0.
        result = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        tl.store(outputs, result.to(out_ptr.dtype.element_ty), mask=in_tile)
    else:
        partial = item * K + kv_head
        row_number = tl.arange(0, BLOCK_M)
        partial_rows = partial_ptr + (partial * R + row_number)[:, None] * D_PAD
        tl.store(partial_rows + element[None, :], acc, mask=(row_number < R)[:, None])
        tl.store(state_ptr + partial * 2 * R + row_number, row_max, mask=row_number < R)
        tl.store(state_ptr + (partial * 2 + 1) * R + row_number, row_sum, mask=row_number < R)
        if REST == 0:
            # Orders all threads' stores before the arrival, and the reads of the last program after it.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrived_ptr + first * K + kv_head, 1, sem="acq_rel", scope="gpu")
            if arrived == chunks - 1:
                combine(
                    out_ptr, partial_ptr, state_ptr, first, chunks, kv_head, first_token, tile, num_rows, 0,
                    out_stride_token, out_stride_head, out_stride_dim, G, K, D, D_PAD, BLOCK_M, R, R, BLOCK_C,
                )  # fmt: skip
                tl.store(arrived_ptr + first * K + kv_head, 0)
