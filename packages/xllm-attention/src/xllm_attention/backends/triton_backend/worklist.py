"""The kernel that makes a step's work list: which program attends which query rows over which keys.

Owns how a step is split into items (split-KV). An item is one tile of a sequence's query rows and one chunk of its
keys. If the keys of a tile are split into several chunks, the last of its programs to finish combines them. In decode
a program attends a run of items, in other steps one item. The kernel makes the list from the device metadata. So
planning never waits for the device and holds no host buffer that a running step still reads: the list is ordered on the
stream like any other work. The largest number of items depends on the bucket only, so a captured launch is valid for
every length.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of the list [capacity, ITEM_WIDTH] int32: one item is half a cache line. A query row is a token and one head
# of a group: row = token * G + head.
TOKEN = tl.constexpr(0)  # the step's token that is the sequence's first
NUM_ROWS = tl.constexpr(1)  # query rows of the sequence: its tokens times G
PREFIX = tl.constexpr(2)  # KV length before the sequence's first token of this step
KV_LEN = tl.constexpr(3)  # KV length, this step's tokens included
TABLE = tl.constexpr(4)  # where the sequence's pages begin in the page indices
TILE = tl.constexpr(5)  # number of the tile of query rows
BEGIN = tl.constexpr(6)  # first key position of the chunk
END = tl.constexpr(7)  # key position after the chunk
FIRST = tl.constexpr(8)  # item of the tile's first chunk
CHUNKS = tl.constexpr(9)  # chunks of the tile; 0: no such item
SLOT = tl.constexpr(10)  # decode: where the token is written; below 0: nowhere
RUN_BEGIN = tl.constexpr(11)  # decode: first item of the program of this number; no matter of the item itself
RUN_END = tl.constexpr(12)  # decode: the item after its last
EMPTY_BEGIN = tl.constexpr(13)  # decode: first of its items without keys
EMPTY_END = tl.constexpr(14)  # decode: the item after the last of them
ITEM_WIDTH = tl.constexpr(16)
BLOCK_P = tl.constexpr(512)  # page indices copied at a time


@triton.jit  # type: ignore[untyped-decorator]
def chunk_counts(
    q_lens: tl.tensor, kv_lens: tl.tensor, G: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr
) -> tl.tensor:
    """Tiles of query rows of each sequence, and the number of keys that its queries see."""
    tiles = (q_lens * G + BLOCK_M - 1) // BLOCK_M
    seen = kv_lens
    if WINDOW > 0:
        seen = tl.minimum(kv_lens, q_lens + (WINDOW - 1))
    return tiles, seen


@triton.jit  # type: ignore[untyped-decorator]
def shares(
    units: tl.tensor, row_ends: tl.tensor, total_units: tl.tensor, wave: tl.tensor, most: tl.tensor,
    LEAST_UNITS: tl.constexpr, ENOUGH_UNITS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Units per program of a decode step, whether sequences get their own programs, and the items of each."""
    most = tl.minimum(most, tl.sum((units > 0).to(tl.int32), 0))
    waves = tl.maximum(tl.minimum(total_units // (wave * ENOUGH_UNITS), most), 1)
    chunk = tl.maximum((total_units + wave * waves - 1) // (wave * waves), LEAST_UNITS)
    alone = (units + chunk - 1) // chunk
    even = tl.sum(alone, 0) <= wave * waves
    crossing = (row_ends - 1) // chunk - (row_ends - units) // chunk + 1
    return chunk, even, tl.where(even, alone, tl.where(units > 0, crossing, 0))


@triton.jit  # type: ignore[untyped-decorator]
def share_of(
    row_first: tl.tensor, row_units: tl.tensor, number: tl.tensor, chunk: tl.tensor, even: tl.tensor
) -> tl.tensor:
    """Chunks of a decode row whose units begin at row_first, and the units of it that belong to chunk `number`."""
    program = row_first // chunk
    crossed = (row_first + row_units - 1) // chunk - program + 1
    chunks = tl.maximum(tl.where(even, (row_units + chunk - 1) // chunk, crossed), 1)
    program += number
    begin = tl.where(even, row_units * number // chunks, tl.maximum(program * chunk - row_first, 0))
    end = tl.where(even, row_units * (number + 1) // chunks, tl.minimum((program + 1) * chunk - row_first, row_units))
    return chunks, begin, end


@triton.jit  # type: ignore[untyped-decorator]
def first_item(
    program: tl.tensor, chunk: tl.tensor, ends: tl.tensor, row_ends: tl.tensor, total_units: tl.tensor
) -> tl.tensor:
    """First item of programs that take `chunk` units each of sequences laid one after the other.

    ends, row_ends [BLOCK_B]: items and units up to the end of each sequence.
    """
    unit = program * chunk
    passed = row_ends[None, :] <= unit[:, None]
    items = tl.max(tl.where(passed, ends[None, :], 0), 1)
    row_first = tl.max(tl.where(passed, row_ends[None, :], 0), 1)
    return tl.where(unit < total_units, items + program - row_first // chunk, tl.max(ends, 0))


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["max_pages", "num_seqs", "num_items", "target", "wave"],
    do_not_specialize_on_alignment=["kv_indptr_ptr", "qo_indptr_ptr", "table_indptr_ptr", "slots_ptr", "pages_ptr"],
)
def worklist_kernel(
    kv_indptr_ptr: tl.tensor,  # [B + 1] cumulative KV lengths
    qo_indptr_ptr: tl.tensor,  # [B + 1]; unused in decode
    table_indptr_ptr: tl.tensor,  # [B + 1] into the page indices
    slots_ptr: tl.tensor,  # [T]; used in decode only
    pages_ptr: tl.tensor,  # [P] page indices of the step
    kept_ptr: tl.tensor,  # where the kernels read them
    items_ptr: tl.tensor,  # [capacity, ITEM_WIDTH]
    max_pages: tl.tensor,  # to be copied; 0: none are
    num_seqs: tl.tensor, num_items: tl.tensor, target: tl.tensor, wave: tl.tensor,
    G: tl.constexpr, WINDOW: tl.constexpr, DECODE: tl.constexpr, BLOCK_M: tl.constexpr,
    UNIT: tl.constexpr, LEAST_UNITS: tl.constexpr, ENOUGH_UNITS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_I: tl.constexpr,
) -> None:  # fmt: skip
    """Each program fills BLOCK_I items. All repeat the sums over the batch, which is cheaper than sharing them.

    They also copy the page indices, which saves the host a launch.

    Chunks are multiples of UNIT keys. In decode all programs get the same number of units: `wave` programs, or several
    waves of them where each has ENOUGH_UNITS then. Sequences are cut into equal chunks, a program each, if that takes
    no more programs; else the sequences are laid one after the other and cut wherever a program's share ends. Rows of
    KV length 0, such as padding, are items without keys after all others, dealt out evenly: how keys are cut, and so
    the order of sums, does not depend on the padding. In other steps, with n chunks' worth of keys, chunks are cut so
    that they make up one wave of programs (`wave` items) while that leaves them shorter than ENOUGH_UNITS; beyond it
    they are made no longer than needed to stay within `target` items.
    """
    num_pages = tl.minimum(tl.load(table_indptr_ptr + num_seqs), max_pages)
    for start in range(tl.program_id(0) * BLOCK_P, num_pages, tl.num_programs(0) * BLOCK_P):
        index = start + tl.arange(0, BLOCK_P)
        tl.store(kept_ptr + index, tl.load(pages_ptr + index, mask=index < num_pages), mask=index < num_pages)
    seq = tl.arange(0, BLOCK_B)
    real = seq < num_seqs
    kv_lens = tl.load(kv_indptr_ptr + seq + 1, mask=real, other=0) - tl.load(kv_indptr_ptr + seq, mask=real, other=0)
    if DECODE:
        q_lens = real.to(tl.int32)
    else:
        q_lens = tl.load(qo_indptr_ptr + seq + 1, mask=real, other=0) - tl.load(qo_indptr_ptr + seq, mask=real, other=0)
    tiles, seen = chunk_counts(q_lens, kv_lens, G, WINDOW, BLOCK_M)
    units = (seen + UNIT - 1) // UNIT
    total_units = tl.sum(tiles * units, 0)
    row_ends = tl.cumsum(units, 0)  # where the sequences' units end when they are laid one after the other
    if DECODE:
        most = (target - num_seqs) // wave
        chunk, even, counts = shares(units, row_ends, total_units, wave, most, LEAST_UNITS, ENOUGH_UNITS)
    else:
        # sum(tiles * ceil(units / chunk)) <= total_units / chunk + total_tiles: within `target` for this chunk.
        spare = target - tl.sum(tiles, 0)
        least = tl.minimum((total_units + wave - 1) // wave, ENOUGH_UNITS)
        chunk = tl.maximum(tl.maximum((total_units + spare - 1) // tl.maximum(spare, 1), least), LEAST_UNITS)
        if spare <= 0:
            chunk = tl.maximum(tl.max(units, 0), 1)
        counts = tiles * tl.maximum((units + chunk - 1) // chunk, 1)
    ends = tl.cumsum(counts, 0)

    item = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    before = ends[None, :] <= item[:, None]
    row = tl.sum(before.to(tl.int32), 1)
    local = item - tl.max(tl.where(before, ends[None, :], 0), 1)
    if DECODE:
        count = tl.max(ends, 0)  # of the items with keys
        empty_ends = tl.cumsum((real & (units == 0)).to(tl.int32), 0)
        num_empty = tl.max(empty_ends, 0)
        has_keys = item < count
        passed = empty_ends[None, :] <= (item - count)[:, None]
        row = tl.where(has_keys, row, tl.sum(passed.to(tl.int32), 1))
    live = (item < num_items) & (row < num_seqs)
    kv_first = tl.load(kv_indptr_ptr + row, mask=live, other=0)
    kv_len = tl.load(kv_indptr_ptr + row + 1, mask=live, other=0) - kv_first
    if DECODE:
        token = row
        q_len = live.to(tl.int32)
        slot = tl.load(slots_ptr + row, mask=live, other=-1)
    else:
        token = tl.load(qo_indptr_ptr + row, mask=live, other=0)
        q_len = tl.load(qo_indptr_ptr + row + 1, mask=live, other=0) - token
        slot = tl.full([BLOCK_I], -1, tl.int32)
    _, keys = chunk_counts(q_len, kv_len, G, WINDOW, BLOCK_M)
    if DECODE:
        number = tl.where(has_keys, local, 0)
        row_first = tl.max(tl.where(before, row_ends[None, :], 0), 1)
        row_units = (keys + UNIT - 1) // UNIT
        chunks, unit, unit_end = share_of(row_first, row_units, number, chunk, even)
        begin = kv_len - keys + unit * UNIT
        end = kv_len - keys + unit_end * UNIT
        chunks = tl.where(has_keys, chunks, 1)
    else:
        chunks = tl.maximum(((keys + UNIT - 1) // UNIT + chunk - 1) // chunk, 1)
        number = local % chunks
        begin = kv_len - keys + number * chunk * UNIT
        end = begin + chunk * UNIT
    out = items_ptr + item * ITEM_WIDTH
    inside = item < num_items
    tl.store(out + TOKEN, token, mask=inside)
    tl.store(out + NUM_ROWS, q_len * G, mask=inside)
    tl.store(out + PREFIX, tl.maximum(kv_len - q_len, 0), mask=inside)
    tl.store(out + KV_LEN, kv_len, mask=inside)
    tl.store(out + TABLE, tl.load(table_indptr_ptr + row, mask=live, other=0), mask=inside)
    tl.store(out + TILE, 0 if DECODE else local // chunks, mask=inside)
    tl.store(out + BEGIN, begin, mask=inside)
    tl.store(out + END, tl.minimum(end, kv_len), mask=inside)
    tl.store(out + FIRST, item - number, mask=inside)
    tl.store(out + CHUNKS, tl.where(live, chunks, 0), mask=inside)
    tl.store(out + SLOT, slot, mask=inside)
    if DECODE:
        run_begin = tl.where(even, tl.minimum(item, count), first_item(item, chunk, ends, row_ends, total_units))
        run_end = tl.where(even, tl.minimum(item + 1, count), first_item(item + 1, chunk, ends, row_ends, total_units))
        tl.store(out + RUN_BEGIN, run_begin, mask=inside)
        tl.store(out + RUN_END, run_end, mask=inside)
        programs = target - num_seqs
        dealt = tl.minimum(item, programs)
        tl.store(out + EMPTY_BEGIN, count + num_empty * dealt // programs, mask=inside)
        tl.store(out + EMPTY_END, count + num_empty * tl.minimum(item + 1, programs) // programs, mask=inside)
