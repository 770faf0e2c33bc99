"""Launching a Triton kernel at a small cost to the host.

Owns the choice among a kernel's compiled variants. Triton's own launch inspects every argument each time (15 us where
this takes 9); here the compiled variant is found by dtypes and constants, and all else that it may depend on is fixed:
pointers are aligned to 16 bytes, and plain integers are not specialized.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime import driver

from .overlap import can_overlap


class Launcher:
    """A `triton.jit` kernel whose parameters are tensors, then scalars, then constants, in this order.

    The kernel must declare its integer scalars under `do_not_specialize`. Tensors are on the current device. With
    `overlaps` its last constant says whether it is launched as `overlap` describes, which is decided here.
    """

    def __init__(self, kernel: Any, *, overlaps: bool = False, **options: int) -> None:
        self._kernel = kernel
        self._overlaps = overlaps
        self._options = options  # num_warps, num_stages
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[torch.Tensor, ...],
        scalars: tuple[float, ...],
        constants: tuple[object, ...],
        **options: int,
    ) -> None:
        device = tensors[0].get_device()  # -1: the interpreter's
        if self._overlaps:
            overlap = device >= 0 and can_overlap(device)
            constants = (*constants, overlap)
            if overlap:
                options["launch_pdl"] = True
        addresses = 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
        arguments = (*tensors, *scalars, *constants)
        if addresses % 16:
            self._kernel[grid](*arguments, **(self._options | options))
            return
        key = (device, constants, *[tensor.dtype for tensor in tensors], *options.values())
        compiled = self._compiled.get(key)
        if compiled is not None:
            stream = driver.active.get_current_stream(device)
            # Without the metadata and hooks that profilers of Triton itself ask for.
            compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
            return
        compiled = self._kernel[grid](*arguments, **(self._options | options))
        if compiled is not None:  # the interpreter compiles nothing
            self._compiled[key] = compiled


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size` (Triton's block sizes)."""
    return 1 << max(size - 1, 0).bit_length()


def num_warps_for(block: int) -> int:
    """Warps for a row of `block` elements: 8 to 16 elements a thread, which makes 16-byte accesses."""
    return min(max(block // 256, 1), 16)
