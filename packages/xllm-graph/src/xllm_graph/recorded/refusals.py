"""Refuses ops that a device graph cannot capture, and names the line that called them.

A device graph records work, not values. An op that brings a value to the host during a capture, or depends on one,
fails there at best. At worst its value is baked in.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..runtime import CaptureError

_TO_HOST: dict[object, str] = {
    torch.Tensor.tolist: "tolist()",
    torch.Tensor.numpy: "numpy()",
    torch.Tensor.cpu: "cpu()",
    torch.Tensor.item: "item()",
    torch.Tensor.__repr__: "str or repr",
    torch.Tensor.__format__: "format",
    torch.Tensor.__dlpack__: "DLPack",
    torch.Tensor.__dlpack_device__: "DLPack",
    torch.Tensor.__array__: "a numpy array",
    torch.Tensor.__bool__: "bool()",
    torch.Tensor.__int__: "int()",
    torch.Tensor.__float__: "float()",
    torch.Tensor.__index__: "an index",
    torch.Tensor.__reduce_ex__: "pickle or copy",
}
_HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def refuse(what: str) -> CaptureError:
    """The error for `what`, with the innermost Python line outside of torch and this package."""
    frames = traceback.extract_stack(sys._getframe(1))
    for frame in reversed(frames):
        if not frame.filename.startswith((*_HIDDEN, "<frozen")):
            return CaptureError(f"{what} (at {frame.filename}:{frame.lineno} in {frame.name}: {frame.line})")
    return CaptureError(what)


def check_op(func: torch._ops.OpOverload) -> None:
    """Refuses ops that a graph cannot capture."""
    if torch.Tag.data_dependent_output in func.tags:
        raise refuse(f"{func} reads a value on the host, which a graph cannot hold")
    if torch.Tag.dynamic_output_shape in func.tags:
        raise refuse(f"{func} returns a shape that depends on values, which a graph cannot hold")
    if func is torch.ops.aten.lift_fresh.default:
        raise refuse("a tensor is made of host values during the capture: make it before, where it is kept")
    if func in (torch.ops.aten.resize_.default, torch.ops.aten.set_.source_Storage_storage_offset):
        raise refuse(f"{func} moves a tensor to other memory, which a graph cannot follow")


def check_result(func: torch._ops.OpOverload, result: object) -> None:
    """Refuses a result that is not made of tensors."""
    parts = result if isinstance(result, tuple | list) else (result,)
    for part in parts:
        if isinstance(part, tuple | list):
            check_result(func, part)
        elif part is not None and not isinstance(part, torch.Tensor):
            raise refuse(f"{func} returned {type(part).__name__} {part!r}; a graph can hold tensors only")


class HostReadGuard(TorchFunctionMode):
    """Refuses reads of tensors on the host that reach no dispatcher, while `is_active` says so."""

    def __init__(self, is_active: Callable[[], bool]) -> None:
        super().__init__()
        self._is_active = is_active

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._is_active() and (what := _TO_HOST.get(func)) is not None:
            raise refuse(f"{what} of a tensor brings its values to the host, which a graph cannot do")
        return func(*args, **(kwargs or {}))
