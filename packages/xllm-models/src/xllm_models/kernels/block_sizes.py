"""Sizes of Triton blocks and the number of warps for them."""

from __future__ import annotations


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size` (Triton's block sizes)."""
    return 1 << max(size - 1, 0).bit_length()


def num_warps_for(block: int) -> int:
    """Warps for a row of `block` elements: 8 to 16 elements per thread, which makes 16-byte accesses."""
    return min(max(block // 256, 1), 16)
