"""Tuned tile sizes of the attention kernels and the sizes of work lists, with what was measured.

Measured on an H200 (132 multiprocessors, 4.4 TB/s) with groups of 2 heads of 128 in bfloat16; see docs/attention.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from ...spec import AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Tile sizes of the attention kernel for one spec and dtype, for decode or for other steps."""

    block_m: int  # query rows per program; a row is one token and one head of the group
    block_n: int  # keys per iteration, and the unit of chunks
    kept_rows: int  # rows of a tile that a partial result keeps
    block_c: int  # chunks that are combined at a time
    num_warps: int
    num_stages: int  # of the pipeline that loads keys and values
    max_registers: int | None  # per thread; None: the compiler decides
    least_units: int  # fewest units per chunk: below it starting a program costs more than its keys
    enough_units: int  # units of a program from which several waves of programs are better than one
    wave_programs: int  # programs per SM that make up a wave
    max_waves: int  # waves of programs that a step may have


def decode_tiles(spec: AttentionSpec, dtype: torch.dtype) -> Tiles:
    """Tiles of a decode step: one token a sequence, all heads of a group in one tile. It does little but read keys.

    64 keys of 128 bfloat16 in 4 warps take 38 KB and, held to it, 168 registers a thread: three programs fit a
    multiprocessor, and a wave is as many as fit, so that all multiprocessors get the same share even where programs are
    placed while an earlier kernel drains. At 8 heads four programs of 128 registers are 4 percent faster at 64 rows and
    2 percent slower at 100, and a tenth slower where rows are few and a program's start counts. A deeper pipeline, also
    with page indices prefetched one tile, gains 2 percent at most; shares cut finer than a tile gain nothing, and tiles
    of 32 keys lose a tenth.
    """
    d_pad = triton.next_power_of_2(spec.head_dim)
    kept = triton.next_power_of_2(spec.group_size)
    block_n = 64 if d_pad * dtype.itemsize <= 256 else 32
    return Tiles(
        block_m=max(16, kept),  # 16: the smallest tile of the matrix unit
        block_n=block_n,
        kept_rows=kept,
        block_c=_block_c(kept, d_pad),
        num_warps=4,
        num_stages=2,
        max_registers=168 if dtype.itemsize == 2 and d_pad <= 128 else None,
        least_units=1,
        enough_units=2048 // block_n,
        wave_programs=3,
        max_waves=2,
    )


def prefill_tiles(spec: AttentionSpec, dtype: torch.dtype) -> Tiles:
    """Tiles of every other step, with many query rows that share the keys a program loads."""
    d_pad = triton.next_power_of_2(spec.head_dim)
    wide = d_pad * dtype.itemsize > 256
    # Exact fp32 products are unrolled multiplications: large tiles of them compile for a minute and gain nothing.
    block_m = 32 if dtype is torch.float32 else 64 if wide else 128
    block_n = 32 if wide else 64
    return Tiles(
        block_m=block_m,
        block_n=block_n,
        kept_rows=block_m,
        block_c=1,
        num_warps=4 if wide else 8,
        num_stages=2 if wide else 3,
        max_registers=None,
        least_units=max(1, 256 // block_n),
        enough_units=max(1, 256 // block_n),
        wave_programs=2,
        max_waves=1,
    )


def interpreted_tiles(tiles: Tiles) -> Tiles:
    """The same with short chunks and small tiles, so that the interpreter's small cases have several of each."""
    return Tiles(
        block_m=16 if tiles.block_c == 1 else tiles.block_m,
        block_n=16,
        kept_rows=16 if tiles.block_c == 1 else tiles.kept_rows,
        block_c=min(tiles.block_c, 2),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        max_registers=None,
        least_units=1,
        enough_units=4,
        wave_programs=tiles.wave_programs,
        max_waves=tiles.max_waves,
    )


def _block_c(rows: int, d_pad: int) -> int:
    """Chunks combined at a time: all their loads are in flight, 16 registers a thread of 4 warps for 16 of them."""
    return max(1, min(16, 4096 // (rows * d_pad)))
