# mypy: disallow-untyped-decorators=False
"""L2 prefetch of the next layer's weight, from compute capability 9.0 on.

Device memory idles between two small kernels. A norm or an activation uses this time to prefetch the weight of the next
matrix product. It issues the prefetch before it waits for the previous kernel (`overlap`), which is safe because a
prefetch changes no data.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .linear import MAX_ROWS

# A prefetch shortens products of 17 to 256 rows by 0.4 to 0.7 us on an H200, measured when it was added and not kept as
# a result file. Up to `linear.MAX_ROWS` rows the product is bound by memory; above 256 it takes long enough itself.
MANY_ROWS = 256
MAX_BYTES = 16 << 20  # per prefetch: a fraction of the L2 cache, so that data in use is not evicted
_LANES = tl.constexpr(8)  # threads of a program that issue its prefetches; a warp issues them one after another


@triton.jit
def prefetch_share(
    base: tl.tensor, num_bytes: tl.tensor, chunk: tl.tensor, program: tl.tensor, NUM_THREADS: tl.constexpr
) -> None:
    """Prefetches one program's share of the `num_bytes` at `base` into L2.

    `num_bytes` and `chunk` come from `prefetch_shares`: each of _LANES threads prefetches `chunk` bytes.
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
    """Bytes of a weight to prefetch before a product of `num_rows` rows: in all, and per lane. (0, 0): no prefetch."""
    if weight is None or not MAX_ROWS < num_rows <= MANY_ROWS:
        return 0, 0
    num_bytes = min(weight.numel() * weight.element_size(), MAX_BYTES)
    return num_bytes, -(-num_bytes // (num_programs * _LANES.value * 16)) * 16
