"""Launching a kernel without Triton's per-call work. Owns the compiled kernels of one backend.

Triton looks at every argument of every call to find the compiled kernel, which takes several times as long as a small
kernel runs. The arguments of one layer's launches never differ in what matters for that, so the kernel found by the
first call is kept under a key, and called directly from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
from triton.runtime import driver

ALIGNMENT = 16  # bytes; kernels are compiled apart for pointers that are aligned to it


class Launcher:
    """Launches one kernel.

    Args:
        kernel: a `triton.jit` function whose parameters are tensors and unspecialized numbers first, constants last.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
        self._direct = isinstance(kernel, triton.JITFunction)  # not in the interpreter

    def __call__(
        self, key: Hashable, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        """Launches `grid` programs.

        Args:
            key: equal for calls that differ only in the numbers and the addresses of the tensors; must not be equal
                for tensors of different dtypes, nor of different alignment (`alignment`) where the kernel asks for it.
            grid: number of programs along each axis.
            arguments: tensors of the current device and numbers, in order, a tensor first.
            constants: of the kernel, in its order.
            options: of the compilation.
        """
        known = self._compiled.get(key)
        if known is not None:
            compiled, values = known
            stream = driver.active.get_current_stream(arguments[0].get_device())
            # Without the metadata and hooks that profilers of Triton itself ask for.
            compiled.run(
                *grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments, *values
            )
            return
        compiled = self._kernel[grid](*arguments, **constants, **options)
        if self._direct:
            self._compiled[key] = (compiled, tuple(constants.values()))

    def bound(
        self, key: Hashable, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> Callable[[], None]:
        """A call that launches the same again, at the least cost; for a key that was launched before.

        It takes the tensors' addresses as they are now; what lies there must be alive when it is called.
        """
        if not self._direct:
            return lambda: self._kernel[grid](*arguments, **constants)
        compiled, values = self._compiled[key]
        device = arguments[0].get_device()
        fixed = (
            compiled.function, compiled.packed_metadata, None, None, None,
            *(value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments), *values,
        )  # fmt: skip
        run, current_stream = compiled.run, driver.active.get_current_stream
        return lambda: run(*grid, current_stream(device), *fixed)

    def prepare(
        self, key: Hashable, arguments: tuple[Any, ...], constants: dict[str, Any], options: dict[str, Any]
    ) -> None:
        """Compiles and loads what a call with these arguments would launch, and launches nothing. For JIT functions."""
        if key in self._compiled:
            return
        compiled = self._kernel.warmup(*arguments, grid=(1, 1, 1), **constants, **options)
        assert compiled.run is not None  # loads it
        self._compiled[key] = (compiled, tuple(constants.values()))


def alignment(*tensors: torch.Tensor) -> tuple[bool, ...]:
    """Which of the tensors begin at a multiple of ALIGNMENT."""
    return tuple(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)
