"""The work list of one step: which program attends which query rows over which keys. Made on the device.

Owns how a step is cut into items. An item is one tile of a sequence's query rows and one chunk of its keys; a tile
whose keys are cut into several chunks is combined by whichever of its programs ends last. The list is made by a kernel
from the device metadata, so that planning neither waits for the device nor holds host buffers that a running step
still reads: it is ordered on the stream like any other work. How many items there are at most depends on the bucket
only, so a captured launch is right for every length.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of the list [capacity, ITEM_WIDTH] int32: one item is half a cache line. A query row is
# a token and one head of a group: row = token * G + head.
TOKEN = tl.constexpr(0)  # the step's token that is the sequence's first
NUM_ROWS = tl.constexpr(1)  # query rows of the sequence: its tokens times G
PREFIX = tl.constexpr(2)  # KV length before the sequence's first token of this step
KV_LEN = tl.constexpr(3)  # KV length, this step's tokens included
TABLE = tl.constexpr(4)  # where the sequence's pages begin in the page indices
TILE = tl.constexpr(5)  # number of the tile of query rows
BEGIN = tl.constexpr(6)  # first key position of the chunk
END = tl.constexpr(7)  # key position behind the chunk
FIRST = tl.constexpr(8)  # item of the tile's first chunk
CHUNKS = tl.constexpr(9)  # chunks of the tile; 0: no such item
SLOT = tl.constexpr(10)  # decode: where the token is written; below 0: nowhere
ITEM_WIDTH = tl.constexpr(16)


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


@triton.jit(do_not_specialize=["num_seqs", "num_items", "target", "wave"])  # type: ignore[untyped-decorator]
def worklist_kernel(
    kv_indptr_ptr: tl.tensor,  # [B + 1] cumulative KV lengths
    qo_indptr_ptr: tl.tensor,  # [B + 1]; unused in decode
    table_indptr_ptr: tl.tensor,  # [B + 1] into the page indices
    slots_ptr: tl.tensor,  # [T]; used in decode only
    items_ptr: tl.tensor,  # [capacity, ITEM_WIDTH]
    num_seqs: tl.tensor, num_items: tl.tensor, target: tl.tensor, wave: tl.tensor,
    G: tl.constexpr, WINDOW: tl.constexpr, DECODE: tl.constexpr, BLOCK_M: tl.constexpr,
    UNIT: tl.constexpr, LEAST_UNITS: tl.constexpr, ENOUGH_UNITS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_I: tl.constexpr,
) -> None:  # fmt: skip
    """Each program fills BLOCK_I items. All repeat the sums over the batch, which is cheaper than sharing them.

    Chunks are multiples of UNIT keys. With n chunks' worth of keys in the step, chunks are cut so that they make up one
    wave of programs (`wave` items) while that leaves them shorter than ENOUGH_UNITS, where the balance of several
    waves is not worth the restarts; beyond it they are made no longer than needed to stay within `target` items.
    """
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
    # sum(tiles * ceil(units / chunk)) <= total_units / chunk + total_tiles: within `target` for this chunk.
    spare = target - tl.sum(tiles, 0)
    least = tl.minimum((total_units + wave - 1) // wave, ENOUGH_UNITS)
    chunk = tl.maximum(tl.maximum((total_units + spare - 1) // tl.maximum(spare, 1), least), LEAST_UNITS)
    if spare <= 0:
        chunk = tl.maximum(tl.max(units, 0), 1)
    ends = tl.cumsum(tiles * tl.maximum((units + chunk - 1) // chunk, 1), 0)

    item = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    before = ends[None, :] <= item[:, None]
    row = tl.sum(before.to(tl.int32), 1)
    local = item - tl.max(tl.where(before, ends[None, :], 0), 1)
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
    chunks = tl.maximum(((keys + UNIT - 1) // UNIT + chunk - 1) // chunk, 1)
    number = local % chunks
    begin = kv_len - keys + number * chunk * UNIT
    # A decode row of KV length 0 is padding: an item without keys, which writes zeros.
    out = items_ptr + item * ITEM_WIDTH
    inside = item < num_items
    tl.store(out + TOKEN, token, mask=inside)
    tl.store(out + NUM_ROWS, q_len * G, mask=inside)
    tl.store(out + PREFIX, tl.maximum(kv_len - q_len, 0), mask=inside)
    tl.store(out + KV_LEN, kv_len, mask=inside)
    tl.store(out + TABLE, tl.load(table_indptr_ptr + row, mask=live, other=0), mask=inside)
    tl.store(out + TILE, local // chunks, mask=inside)
    tl.store(out + BEGIN, begin, mask=inside)
    tl.store(out + END, tl.minimum(begin + chunk * UNIT, kv_len), mask=inside)
    tl.store(out + FIRST, item - number, mask=inside)
    tl.store(out + CHUNKS, tl.where(live, chunks, 0), mask=inside)
    tl.store(out + SLOT, slot, mask=inside)
