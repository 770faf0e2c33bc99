"""The fp8 KV cache: `CacheScales`, the scales of one layer, and the conversion between values and cache entries.

An entry is e4m3(clamp(value / scale, -448, 448)), and stands for entry * scale. A value that is not finite becomes NaN,
which e4m3 has, unlike infinity.
"""

from __future__ import annotations

import math
from typing import Final

import torch

FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0


class CacheScales:
    """The scales of one layer's fp8 cache, per tensor, on the host. 1.0 until the model's weights are loaded.

    A captured graph holds the scales as numbers. So they are set once: a model whose weights are loaded again keeps
    them.
    """

    __slots__ = ("_loaded", "k", "v")

    def __init__(self, k: float = 1.0, v: float = 1.0) -> None:
        self._loaded = False
        self.k = _checked("k_scale", k)
        self.v = _checked("v_scale", v)

    def check(self, k: float, v: float) -> None:
        """Checks the scales that `load` would set.

        Raises:
            ValueError: a scale that is not positive and finite, or one that differs from that of an earlier `load`.
        """
        new = (_checked("k_scale", k), _checked("v_scale", v))
        if self._loaded and new != (self.k, self.v):
            raise ValueError(
                f"k_scale and v_scale are {new}; an earlier load set {(self.k, self.v)}, which captured graphs and the "
                "entries of the cache hold"
            )

    def load(self, k: float, v: float) -> None:
        """Sets the scales. Raises as `check`."""
        self.check(k, v)
        self.k, self.v = _checked("k_scale", k), _checked("v_scale", v)
        self._loaded = True

    def __repr__(self) -> str:
        return f"CacheScales(k={self.k}, v={self.v})"


def quantize(values: torch.Tensor, scale: float) -> torch.Tensor:
    """The cache entries, float8_e4m3fn, of values of any float dtype. Divides and rounds in fp32."""
    high = values.to(torch.float32)
    # PyTorch would multiply a CUDA tensor by the reciprocal of a number on the host, which rounds otherwise.
    scaled = high / high.new_full((), scale)
    return scaled.clamp(-FP8_MAX, FP8_MAX).masked_fill(~high.isfinite(), torch.nan).to(FP8)


def dequantize(entries: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """The values that cache entries stand for."""
    return entries.to(dtype) * entries.new_full((), scale, dtype=dtype)


def _checked(name: str, scale: float) -> float:
    """The scale as fp32, which kernels multiply with."""
    rounded = float(torch.tensor(scale, dtype=torch.float32))
    if not (math.isfinite(rounded) and rounded > 0):
        raise ValueError(f"{name} is {scale}; it must be positive and finite in fp32")
    return rounded
