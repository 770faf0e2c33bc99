# mypy: disallow-untyped-decorators=False
"""Kernels that start while the one before them ends (programmatic dependent launch, from compute capability 9.0 on).

Owns the one rule that makes it safe: a kernel launched so reads and writes nothing before `wait_for_previous`, and
every one of its programs calls it. Then a kernel that has ended means that all before it have, as on any stream.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr) -> None:
    """First in a kernel: waits for the one before it, then lets the next one come and wait in turn."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
