# mypy: disallow-untyped-decorators=False
"""Device side of programmatic dependent launch (PDL, compute capability 9.0): a kernel starts before the previous ends.

Owns the rule that makes this safe: every program of a kernel launched with PDL calls `wait_for_previous` before it
reads or writes memory. Prefetches may come before it. So kernels still complete in stream order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr) -> None:
    """Waits until the previous kernel has completed, then lets the next kernel start. First statement of a kernel."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
