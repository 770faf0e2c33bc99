"""Launches Triton kernels at a low host cost, for attention and for the models' kernels.

Triton's public launch, `kernel[grid](...)`, inspects every argument of every call to find the compiled variant. That
takes several times as long as a small kernel runs: 15 us where `Launcher` takes 9. The launchers here keep each
compiled variant under a key and call it directly. This is the only module that uses Triton's private launch interface
(`CompiledKernel.run`, `function` and `packed_metadata`, and the driver's current stream). With a Triton whose interface
was not tested they launch through the public one. `import xllm_attention` does not import this module, since it imports
Triton.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, Final

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime import driver

ALIGNMENT: Final = 16  # bytes; Triton compiles a variant for pointers that are multiples of it, and one for others

# Decode sweeps ran on an H200 with 3.6 (benchmarks/results/sweep-h200.json) and with 3.8. 3.9 declares the same
# parameters; tests/test_triton_launch.py compares those of the installed version.
FIRST_TESTED: Final = (3, 6)
LAST_TESTED: Final = (3, 9)

_Launch = Callable[[tuple[int, int, int], tuple[object, ...]], None]  # of (grid, arguments)
_logger = logging.getLogger(__name__)


def untested_interface(version: str, compiled_kernel: type) -> str | None:
    """Why Triton's private launch interface is not to be used; None if it is the tested one.

    Args:
        version: `triton.__version__`.
        compiled_kernel: Triton's class of compiled kernels.
    """
    major, minor = version.split(".")[:2]
    if not FIRST_TESTED <= (int(major), int(minor)) <= LAST_TESTED:
        first, last = (".".join(map(str, limit)) for limit in (FIRST_TESTED, LAST_TESTED))
        return f"triton {version} is not one of the tested versions, {first} to {last}"
    if not isinstance(getattr(compiled_kernel, "run", None), property):
        return f"CompiledKernel of triton {version} has no property run"
    return None


@cache
def uses_private_interface() -> bool:
    """Whether compiled kernels are called directly. Decided once per process; logs a warning if they are not."""
    reason = untested_interface(triton.__version__, CompiledKernel)
    if reason is not None:
        _logger.warning("kernels are launched through Triton's public interface, at a higher host cost: %s", reason)
    return reason is None


@cache
def can_overlap(device: int) -> bool:
    """Whether the current device, whose index this is, supports programmatic dependent launch (PDL)."""
    target = driver.active.get_current_target()
    return target.backend == "cuda" and int(target.arch) >= 90


def alignment(*tensors: torch.Tensor) -> tuple[bool, ...]:
    """For each tensor, whether its address is a multiple of ALIGNMENT."""
    return tuple(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)


class Launcher:
    """Launches a `triton.jit` kernel whose parameters are tensors, then scalars, then constants, in this order.

    Finds the compiled variant by device, dtypes, constants and options. Nothing else may select one: the kernel
    declares its integer scalars under `do_not_specialize`, and a call with a pointer that is not aligned to ALIGNMENT
    takes the public launch.

    Args:
        kernel: a `triton.jit` function.
        overlaps: the kernel takes part in PDL. Its last constant says whether this launch does; the launcher sets it.
        options: of every launch: num_warps, num_stages.
    """

    def __init__(self, kernel: Any, *, overlaps: bool = False, **options: int) -> None:
        self._kernel = kernel
        self._overlaps = overlaps
        self._options = options
        self._launches: dict[tuple[object, ...], _Launch] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[torch.Tensor, ...],
        scalars: tuple[float, ...],
        constants: tuple[object, ...],
        **options: int,
    ) -> None:
        """Launches `grid` programs on the current stream of the current device, where the tensors are.

        `options` are of this launch and add to the launcher's.
        """
        device = tensors[0].get_device()  # -1: a CPU tensor, for Triton's interpreter
        if self._overlaps:
            overlap = device >= 0 and can_overlap(device)
            constants = (*constants, overlap)
            if overlap:
                options["launch_pdl"] = True
        addresses = 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
        arguments = (*tensors, *scalars, *constants)
        if addresses % ALIGNMENT:
            self._kernel[grid](*arguments, **(self._options | options))
            return
        key = (device, constants, *[tensor.dtype for tensor in tensors], *options.values())
        launch = self._launches.get(key)
        if launch is not None:
            launch(grid, arguments)
            return
        compiled = self._kernel[grid](*arguments, **(self._options | options))
        if compiled is not None and uses_private_interface():  # None: the interpreter compiles nothing
            self._launches[key] = _direct_launch(compiled, device, ())


class KeyedLauncher:
    """Launches a `triton.jit` kernel whose variants the caller tells apart by a key.

    The key must differ where dtypes, constants, options or the `alignment` of the tensors differ. It may ignore
    alignment where the kernel declares `do_not_specialize_on_alignment`.

    Args:
        kernel: a `triton.jit` function whose parameters are tensors and unspecialized numbers first, constants last.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._direct: set[Hashable] = set()  # keys of the launches that use the private interface
        self._launches: dict[Hashable, _Launch] = {}

    def __call__(
        self, key: Hashable, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        """Launches `grid` programs on the current stream.

        Args:
            key: of the variant.
            grid: number of programs along each axis.
            arguments: tensors of the current device and numbers, in the kernel's order, a tensor first.
            constants: of the kernel, in its order.
            options: of the compilation: num_warps, num_stages, maxnreg, launch_pdl.
        """
        launch = self._launches.get(key)
        if launch is not None:
            launch(grid, arguments)
            return
        compiled = self._kernel[grid](*arguments, **constants, **options)
        self._keep(key, compiled, arguments, constants, options)

    def prepare(
        self, key: Hashable, arguments: tuple[Any, ...], constants: dict[str, Any], options: dict[str, Any]
    ) -> None:
        """Compiles and loads the variant of a call with these arguments. Launches nothing."""
        if key not in self._launches:
            compiled = self._kernel.warmup(*arguments, grid=(1, 1, 1), **constants, **options)
            self._keep(key, compiled, arguments, constants, options)

    def bind(
        self, key: Hashable, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: dict[str, Any],
        options: dict[str, Any],
    ) -> Callable[[], None]:  # fmt: skip
        """Prepares the variant and returns its launch with these arguments fixed, which costs the host least.

        The launch reads the addresses that the tensors have now; the caller keeps that memory alive.
        """
        self.prepare(key, arguments, constants, options)
        launch = self._launches[key]
        if key in self._direct:
            arguments = tuple(value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments)
        return lambda: launch(grid, arguments)

    def _keep(
        self, key: Hashable, compiled: Any, arguments: tuple[Any, ...], constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        if compiled is not None and uses_private_interface():  # None: the interpreter compiles nothing
            self._launches[key] = _direct_launch(compiled, arguments[0].get_device(), tuple(constants.values()))
            self._direct.add(key)
            return
        getattr(compiled, "run", None)  # loads the kernel, as far as this Triton still does it so

        def launch(grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
            self._kernel[grid](*arguments, **constants, **options)

        self._launches[key] = launch


def _direct_launch(compiled: Any, device: int, constants: tuple[object, ...]) -> _Launch:
    """Loads a compiled kernel on the current device and returns its launch through the private interface."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    current_stream = driver.active.get_current_stream

    def launch(grid: tuple[int, int, int], arguments: tuple[object, ...]) -> None:
        # The three None stand for what only Triton's profiler hooks read.
        run(*grid, current_stream(device), function, metadata, None, None, None, *arguments, *constants)

    return launch
