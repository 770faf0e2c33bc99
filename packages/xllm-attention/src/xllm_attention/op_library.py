"""Defines ops under `torch.ops.xllm` from typed Python functions.

Owns the library fragment and the registry of collectives. Owns no op: those are defined where they are implemented.

`torch.library.custom_op` would do the same at a higher cost per call: on the CPU, an empty op takes 2.5 times as long
when it returns a tensor, and 6 times as long when it writes to an argument (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

# A fragment, since several packages define ops in this namespace. A Library removes its ops when it is collected, so
# it is a module attribute.
_LIBRARY = torch.library.Library("xllm", "FRAGMENT")  # type: ignore[no-untyped-call]
_collectives: set[str] = set()

P = ParamSpec("P")
R = TypeVar("R")


def define_op(
    *,
    fake: Callable[..., object] | None = None,
    kernels: Mapping[str, Callable[..., object]] | None = None,
    mutates: Sequence[str] = (),
    tags: Sequence[torch.Tag] = (),
    collective: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: registers a function as an op and returns the op's overload, typed as the function.

    The op has the function's name, without a leading underscore. Its schema is inferred from the function's annotations
    (`torch.library.infer_schema`). The function itself serves every device.

    Args:
        fake: computes the results' metadata, for tracing. By default result i is contiguous, with the shape, dtype and
            device of argument i.
        kernels: dispatch key such as "CUDA" to the implementation that PyTorch prefers there.
        mutates: names of the arguments that the op writes to.
        tags: tags of the op, such as `torch.Tag.cudagraph_unsafe`.
        collective: the op communicates with other ranks; see `collective_ops`.
    """

    def define(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__.removeprefix("_")
        schema = torch.library.infer_schema(function, mutates_args=mutates, op_name=name)
        # Our ints are layers, ranks and counts of weights: tracing specializes them, as it would not for a SymInt.
        schema = schema.replace("SymInt", "int")
        _LIBRARY.define(schema, tags=tuple(tags))  # type: ignore[no-untyped-call]
        for key, kernel in {"CompositeExplicitAutograd": function, **(kernels or {})}.items():
            _LIBRARY.impl(name, kernel, key)  # type: ignore[no-untyped-call]
        overload: Any = getattr(torch.ops.xllm, name).default
        num_results = len(overload._schema.returns)
        torch.library.register_fake(f"xllm::{name}", fake or _fake_like_arguments(num_results), lib=_LIBRARY)
        if collective:
            _collectives.add(f"xllm::{name}")
        overload.__doc__ = function.__doc__
        typed: Callable[P, R] = overload
        return typed

    return define


def collective_ops() -> frozenset[str]:
    """Names, such as "xllm::all_reduce_", of the ops defined with `collective=True`.

    Piecewise capture can leave them out of its graphs. A registry serves for this because `torch.Tag` is a fixed list.
    """
    return frozenset(_collectives)


def _fake_like_arguments(num_results: int) -> Callable[..., object]:
    def fake(*args: Any) -> object:
        results = tuple(arg.new_empty(arg.shape) for arg in args[:num_results])
        return results if num_results > 1 else results[0] if results else None

    return fake
