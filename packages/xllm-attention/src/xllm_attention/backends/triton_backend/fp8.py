"""Converts in kernels between values and entries of an fp8 cache, by the formula of `xllm_attention.fp8_cache`.

A GPU of compute capability 8.9 or later converts in hardware. Triton's interpreter truncates instead of rounding, and
takes NaN for 480, so there the same numbers are computed in fp32 first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))  # as the kernels are defined
FP8_MAX = tl.constexpr(448.0)
NAN_BYTE = tl.constexpr(480.0)  # what the interpreter stores as NaN's byte, 0x7F, and reads from it


@triton.jit  # type: ignore[untyped-decorator]
def to_fp8(values: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """The cache entries of values: the nearest e4m3 numbers to values / scale, clamped; NaN if not finite."""
    values = values.to(tl.float32)
    finite = tl.abs(values) < float("inf")
    scaled = tl.div_rn(values, scale)
    scaled = tl.minimum(tl.maximum(scaled, -FP8_MAX), FP8_MAX)
    if INTERPRETED:
        # Adding and subtracting a power of two rounds to a multiple of its last bit: of 2^-3 of the value's exponent.
        bits = scaled.to(tl.int32, bitcast=True)
        exponent = tl.maximum((bits >> 23) & 0xFF, 127 - 6)
        magic = ((exponent + 20) << 23).to(tl.float32, bitcast=True)
        rounded = (tl.abs(scaled) + magic) - magic
        scaled = tl.where(bits < 0, -rounded, rounded)  # also the sign of -0
        return tl.where(finite, scaled, NAN_BYTE).to(tl.float8e4nv)
    return tl.where(finite, scaled, float("nan")).to(tl.float8e4nv)


@triton.jit  # type: ignore[untyped-decorator]
def from_fp8(entries: tl.tensor, like: tl.tensor) -> tl.tensor:
    """Cache entries in the dtype of `like`, not multiplied by the scale. fp16, bf16 and fp32 hold every e4m3 number."""
    values = entries.to(like.dtype)
    if INTERPRETED:
        return tl.where(tl.abs(values.to(tl.float32)) > FP8_MAX, float("nan"), values)
    return values
