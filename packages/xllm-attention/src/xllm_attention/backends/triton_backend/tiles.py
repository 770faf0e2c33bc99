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


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """How the kernels see a layer's heads and their elements.

    The query heads of a latent layer share one key, and their accumulators are wide. So a program takes at most 64 of
    them, and several blocks of heads read the keys of one KV head.
    """

    num_blocks: int  # blocks of query heads; KV heads unless the layer is latent
    block_heads: int  # query heads of a block
    sharers: int  # blocks that share a KV head
    dim: int  # elements of a key that the kernel reads with one load; of a value
    rest_dim: int  # elements of a latent key that are no value; 0: the layer is not latent

    @classmethod
    def of(cls, spec: AttentionSpec) -> Heads:
        """The heads of a layer."""
        if not spec.latent:
            return cls(
                num_blocks=spec.num_kv_heads, block_heads=spec.group_size, sharers=1, dim=spec.head_dim, rest_dim=0
            )
        block_heads = next(size for size in range(min(64, spec.group_size), 0, -1) if spec.group_size % size == 0)
        return cls(
            num_blocks=spec.num_heads // block_heads,
            block_heads=block_heads,
            sharers=spec.group_size // block_heads,
            dim=spec.value_head_dim,
            rest_dim=spec.head_dim - spec.value_head_dim,
        )


def decode_tiles(spec: AttentionSpec, dtype: torch.dtype) -> Tiles:
    """Tiles of a decode step: one token a sequence, all heads of a group in one tile. It does little but read keys.

    64 keys of 128 bfloat16 in 4 warps take 38 KB and, held to it, 168 registers a thread: three programs fit a
    multiprocessor, and a wave is as many as fit, so that all multiprocessors get the same share even where programs are
    placed while an earlier kernel drains. At 8 heads four programs of 128 registers are 4 percent faster at 64 rows and
    2 percent slower at 100, and a tenth slower where rows are few and a program's start counts. A deeper pipeline, also
    with page indices prefetched one tile, gains 2 percent at most; shares cut finer than a tile gain nothing, and tiles
    of 32 keys lose a tenth.
    """
    if spec.latent:
        return _latent_tiles(spec, dtype, decode=True)
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
    if spec.latent:
        return _latent_tiles(spec, dtype, decode=False)
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


def _latent_tiles(spec: AttentionSpec, dtype: torch.dtype, *, decode: bool) -> Tiles:
    """Tiles of a latent layer, in every step: few rows of wide accumulators, and keys that are the values too.

    64 rows of 512 fp32 are half the registers of a multiprocessor, and a tile of 64 such keys is 72 KB.
    """
    block_heads = Heads.of(spec).block_heads
    wide = spec.head_dim * dtype.itemsize > 1152
    block_m = max(16, triton.next_power_of_2(block_heads)) if decode else 64
    block_m = min(block_m, 16) if wide and not decode else block_m
    block_n = 16 if wide else 64
    return Tiles(
        block_m=block_m,
        block_n=block_n,
        kept_rows=block_m,
        block_c=8,
        num_warps=8 if block_m > 32 else 4,
        num_stages=2,
        max_registers=None,
        least_units=1 if decode else max(1, 256 // block_n),
        enough_units=2048 // block_n if decode else max(1, 256 // block_n),
        wave_programs=1 if block_m > 32 else 2,
        max_waves=2 if decode else 1,
    )


def interpreted_tiles(tiles: Tiles, *, decode: bool) -> Tiles:
    """The same with short chunks and small tiles, so that the interpreter's small cases have several of each."""
    return Tiles(
        block_m=tiles.block_m if decode else 16,
        block_n=16,
        kept_rows=tiles.kept_rows if decode else 16,
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
