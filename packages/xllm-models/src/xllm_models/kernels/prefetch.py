# mypy: disallow-untyped-decorators=False
"""Asking for weights before they are read, from compute capability 9.0 on.

The memory idles while a small kernel ends and the next one begins. What a product will read of its weight is known long
before, and asking for it changes nothing, so it may come before a kernel waits for the one before it (`overlap`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .linear import MAX_ROWS

MANY_ROWS = 256  # beyond it products take their time; up to `linear.MAX_ROWS` they are bound by the memory alone
MAX_BYTES = 16 << 20  # at once: a part of the cache that does not drive out what is in use
_LANES = tl.constexpr(8)  # threads of a program that ask for its share


@triton.jit
def prefetch_share(
    base: tl.tensor, num_bytes: tl.tensor, chunk: tl.tensor, program: tl.tensor, NUM_THREADS: tl.constexpr
) -> None:
    """Lets the second-level cache load a program's share of `num_bytes` from a pointer on: what `prefetch_shares` says.

    A few of its threads ask for `chunk` bytes each: a warp's threads ask one after the other.
    """
    thread = tl.arange(0, NUM_THREADS)
    offset = (program * _LANES + thread) * chunk
    wanted = tl.where(thread < _LANES, tl.minimum(num_bytes - offset, chunk), 0)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r",
        [(base.to(tl.int64) + offset) & -16, (wanted + 15) & -16],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def prefetch_shares(weight: torch.Tensor | None, num_rows: int, num_programs: int) -> tuple[int, int]:
    """How many bytes of a weight to ask for in front of a product of `num_rows`, and how many for a lane."""
    if weight is None or not MAX_ROWS < num_rows <= MANY_ROWS:
        return 0, 0
    num_bytes = min(weight.numel() * weight.element_size(), MAX_BYTES)
    return num_bytes, -(-num_bytes // (num_programs * _LANES.value * 16)) * 16
