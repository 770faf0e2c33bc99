"""Passes over a built model, which run before its weights are allocated.

One run on meta tensors serves two: the check that each partial sum is summed over the ranks once, and the choice of
the weight that each norm and gated activation prefetches.
"""

from __future__ import annotations

from .meta_run import run_on_meta
from .partial_sums import PartialSums
from .prefetch import NextWeights

__all__ = ["NextWeights", "PartialSums", "run_on_meta"]
