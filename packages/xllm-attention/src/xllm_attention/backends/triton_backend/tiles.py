"""Sizes of the kernels' tiles and of the work lists. Owns the numbers, and why they are what they are.

Measured on an H200 (132 multiprocessors, 4.4 TB/s) with groups of 2 heads of 128 in bfloat16; see docs/attention.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
import triton

from ...backend import Phase, Step
from ...spec import AttentionSpec

FEW_ROWS = 16  # query rows a sequence, on average, up to which a step is like decode: the matrix unit's smallest tile


class StepKind(Enum):
    """What kernels and tiles a step takes. Follows from its phase and padded size, never from lengths."""

    DECODE = "decode"  # one token a sequence, appended by the attention kernel itself
    FEW = "few"  # some tokens a sequence, as in speculative decoding: as bound by memory as decode
    MANY = "many"  # prompts and chunks: bound by products

    @classmethod
    def of(cls, step: Step, group_size: int) -> StepKind:
        """The kind of a step for layers of this group size."""
        if step.phase is Phase.DECODE:
            return cls.DECODE
        return cls.FEW if step.num_tokens * group_size <= FEW_ROWS * step.num_seqs else cls.MANY


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How the attention kernel is cut for one spec, dtype and kind of step."""

    block_m: int  # query rows a program; a row is one token and one head of the group
    block_n: int  # keys an iteration, and the unit of chunks
    kept_rows: int  # rows of a tile that a partial result keeps
    block_c: int  # chunks that are combined at a time
    num_warps: int
    num_stages: int  # of the pipeline that loads keys and values
    least_units: int  # units of a chunk at least: below it a program's start costs more than its keys
    enough_units: int  # units of a chunk from which several waves of programs are better than one
    wave_programs: int  # programs a multiprocessor that make up a wave
    max_waves: int  # waves that chunks may make up


def tiles_for(kind: StepKind, spec: AttentionSpec, dtype: torch.dtype, *, interpreted: bool) -> Tiles:
    """The tiles of one kind of step."""
    tiles = _product_tiles(spec, dtype) if kind is StepKind.MANY else _memory_tiles(kind, spec, dtype)
    if not interpreted:
        return tiles
    # Short chunks and small tiles, so that the interpreter's small cases have several of each.
    rows = {"block_m": 16, "kept_rows": 16} if kind is StepKind.MANY else {}
    return replace(tiles, block_n=16, block_c=min(tiles.block_c, 2), least_units=1, enough_units=4, **rows)


def _memory_tiles(kind: StepKind, spec: AttentionSpec, dtype: torch.dtype) -> Tiles:
    """For steps that do little but read keys.

    64 keys of 128 bfloat16 in 4 warps take 38 KB and 128 registers a thread: four programs fit a multiprocessor, which
    is what keeps enough reads under way. With 3 (168 registers) bandwidth is a fifth lower, and a deeper pipeline gains
    nothing. Tiles of 32 keys lose a tenth, of 128 a tenth at long contexts.
    """
    d_pad = triton.next_power_of_2(spec.head_dim)
    heads = triton.next_power_of_2(spec.group_size)
    block_m = max(FEW_ROWS, heads)
    kept_rows = heads if kind is StepKind.DECODE else block_m
    block_n = 64 if d_pad * dtype.itemsize <= 256 else 32
    return Tiles(
        block_m=block_m,
        block_n=block_n,
        kept_rows=kept_rows,
        # All loads of 16 chunks are in flight at a time, 16 registers a thread.
        block_c=max(1, min(16, 4096 // (kept_rows * d_pad))),
        num_warps=4,
        num_stages=2,
        least_units=1,
        enough_units=512 // block_n,
        wave_programs=4,
        # Programs without work cost a launch as well: 2 us a layer where one sequence could have 8 waves of them.
        max_waves=4,
    )


def _product_tiles(spec: AttentionSpec, dtype: torch.dtype) -> Tiles:
    """For steps with many query rows, which share the keys that a program loads."""
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
        least_units=256 // block_n,
        enough_units=256 // block_n,
        wave_programs=2,
        max_waves=1,
    )
