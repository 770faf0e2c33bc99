# mypy: disallow-untyped-decorators=False
"""One-shot all-gather in Triton over symmetric memory: every rank reads the other ranks' payloads.

A program copies its chunk of the payload into its own rank's buffer (`symmetric_buffers`), writes a ready flag to the
other ranks, waits for theirs, and reads their chunks. The flag is the number of the call, so it needs no reset.

The slots are a double buffer, so one barrier per call is enough: a rank starts the call after the next one, which
overwrites this call's slot, only after every rank has sent the next call's flag, that is, has finished this call.

All programs of a call are resident before the next kernel starts (`overlap`). So a program that polls cannot keep the
programs it waits for off the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xllm_attention.triton_launch import Launcher

from .overlap import wait_for_previous
from .symmetric_buffers import (
    GATHER_BLOCK,
    GATHER_CHUNK_BYTES,
    NUM_PROGRAMS,
    VECTOR_BYTES,
    SymmetricBuffers,
    gather_flags_offset,
)


@triton.jit
def _barrier(
    addresses: tl.tensor,
    count: tl.tensor,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    FLAGS_OFFSET: tl.constexpr,
) -> None:
    """Barrier among the ranks' programs of the same index: writes before it are visible to all of them after it."""
    flag = tl.program_id(0) * NUM_RANKS
    tl.debug_barrier()
    for peer in tl.static_range(NUM_RANKS):
        if peer != RANK:
            peer_flags = (tl.load(addresses + peer) + FLAGS_OFFSET).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(peer_flags + flag + RANK, count, sem="release", scope="sys")
    own_flags = (tl.load(addresses + RANK) + FLAGS_OFFSET).to(tl.pointer_type(tl.int32)) + flag
    for peer in tl.static_range(NUM_RANKS):
        if peer != RANK:
            # By difference, since the count wraps around.
            while tl.atomic_add(own_flags + peer, 0, sem="acquire", scope="sys") - count < 0:
                pass
    tl.debug_barrier()


@triton.jit
def _all_gather_kernel(
    x: tl.tensor,
    out: tl.tensor,
    addresses: tl.tensor,
    counts: tl.tensor,
    num_vectors: tl.tensor,
    row_vectors: tl.tensor,
    num_blocks: tl.tensor,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    FLAGS_OFFSET: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    CHUNK_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Moves vectors of four 32-bit words, BLOCK of them per iteration; `row_vectors` make up a row."""
    wait_for_previous(OVERLAP)
    program = tl.program_id(0)
    count = tl.load(counts + program) + 1
    # A program's chunk has the same offset for every payload size, so it never overlaps another program's.
    chunk = (count & 1).to(tl.int64) * SLOT_BYTES + program.to(tl.int64) * CHUNK_BYTES
    own = tl.multiple_of((tl.load(addresses + RANK) + chunk).to(tl.pointer_type(tl.int32)), 16)
    words = tl.arange(0, 4)[None, :]
    for block in range(num_blocks):
        within = block * BLOCK + tl.arange(0, BLOCK)[:, None]
        vector = program * num_blocks * BLOCK + within
        inside = vector < num_vectors
        value = tl.load(x + (vector * 4 + words), mask=inside, other=0)
        tl.store(own + (within * 4 + words), value, mask=inside)
    _barrier(addresses, count, RANK, NUM_RANKS, FLAGS_OFFSET)
    for block in range(num_blocks):
        within = block * BLOCK + tl.arange(0, BLOCK)[:, None]
        vector = program * num_blocks * BLOCK + within
        inside = vector < num_vectors
        row = vector // row_vectors
        begin = row.to(tl.int64) * (NUM_RANKS * row_vectors) + (vector - row * row_vectors)  # of rank 0's part
        for peer in tl.static_range(NUM_RANKS):
            if peer == RANK:
                value = tl.load(x + (vector * 4 + words), mask=inside, other=0)
            else:
                other = tl.multiple_of((tl.load(addresses + peer) + chunk).to(tl.pointer_type(tl.int32)), 16)
                value = tl.load(other + (within * 4 + words), mask=inside, other=0)
            tl.store(out + ((begin + peer * row_vectors) * 4 + words), value, mask=inside)
    tl.store(counts + program, count)


_launch = Launcher(
    triton.jit(_all_gather_kernel.fn, do_not_specialize=["num_vectors", "row_vectors", "num_blocks"]),
    overlaps=True,
    num_warps=16,
)


def all_gather_into(out: torch.Tensor, x: torch.Tensor, dim: int, buffers: SymmetricBuffers) -> None:
    """out = the ranks' x, one after another along dimension 0 or 1. Both contiguous, x at most GATHER_MAX_BYTES.

    x is a multiple of 16 bytes, and along dimension 1 so is each of its rows [N, M]. All ranks call it in the same
    order with the same sizes, one call after another on the device.
    """
    num_bytes = x.numel() * x.element_size()
    num_blocks = -(-num_bytes // (NUM_PROGRAMS * GATHER_BLOCK))
    constants = (
        buffers.rank, buffers.num_ranks, gather_flags_offset(), NUM_PROGRAMS * GATHER_CHUNK_BYTES, GATHER_CHUNK_BYTES,
        GATHER_BLOCK // VECTOR_BYTES,
    )  # fmt: skip
    words = (x.view(-1).view(torch.int32), out.view(-1).view(torch.int32))  # flat: a row may not be whole words
    tensors = (*words, buffers.addresses, buffers.counts[-1])
    grid = (-(-num_bytes // (num_blocks * GATHER_BLOCK)), 1, 1)
    num_vectors = num_bytes // VECTOR_BYTES
    row_vectors = num_vectors // x.shape[0] if dim == 1 else num_vectors
    _launch(grid, tensors, (num_vectors, row_vectors, num_blocks), constants)
