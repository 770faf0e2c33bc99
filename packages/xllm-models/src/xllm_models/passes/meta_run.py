"""Runs a model's decoder and head once on meta tensors, and reports each module call and op in order of execution.

The order in which modules are registered is not that order: HF's layers register their norms last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..forwards import Forward, wrapped_forwards


class Observer(Protocol):
    """Receives the events of one run. `name` is the module's full name."""

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a module's forward."""

    def leave(self, name: str, module: nn.Module, outputs: Sequence[torch.Tensor]) -> None:
        """After a module's forward."""

    def op(self, name: str, module: nn.Module, op: Any, args: tuple[Any, ...], outputs: Sequence[torch.Tensor]) -> None:
        """After an op (an OpOverload) that `module` called in its own forward, not in that of a child."""


_MAX_VALUES = 1 << 20  # of an op that the CPU computes: activations of one token are fewer, large weights more


class _Reporter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, observers: Sequence[Observer]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observers = observers
        self._running: list[tuple[str, nn.Module]] = []  # the innermost module last

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: PyTorch would import torch._dynamo at the first op, which takes seconds and 76 MB. None runs here."""
        return False

    def wrap(self, name: str, module: nn.Module, forward: Forward) -> Forward:
        def call(*args: Any, **kwargs: Any) -> Any:
            for observer in self._observers:
                observer.enter(name, module, args, kwargs)
            self._running.append((name, module))
            try:
                output = forward(*args, **kwargs)
            # Meta tensors have no values to read, and do not mix with tensors of other devices.
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise ValueError(f"{name} cannot run on meta tensors: {reason}; see docs/porting.md") from error
            finally:
                self._running.pop()
            for observer in self._observers:
                observer.leave(name, module, _tensors(output))
            return output

        return call

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = _run(op, args, kwargs or {})
        if self._running:
            for observer in self._observers:
                observer.op(*self._running[-1], op, (*args, *(kwargs or {}).values()), _tensors(output))
        return output


def run_on_meta(model: nn.Module, *, decoder: nn.Module, lm_head: nn.Module, observers: Sequence[Observer]) -> None:
    """Run `decoder` (input_ids [1], positions [1]) and `lm_head`, parts of `model`, on meta tensors.

    Parameters must be on the meta device already; buffers are replaced by meta copies for the run. A module that reads
    a tensor's value, or uses a tensor of another device that is no buffer, is a ValueError that names the module.
    """
    reporter = _Reporter(observers)
    ids, positions = (torch.zeros(1, dtype=torch.int32, device="meta") for _ in range(2))
    with torch.no_grad(), _meta_buffers(model), wrapped_forwards(model, reporter.wrap), reporter:
        lm_head(decoder(ids, positions))


def _run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op on meta tensors, without PyTorch's meta kernel where that is written in Python.

    Those kernels import torch._dynamo or SymPy at their first call, for seconds and up to 76 MB in each process.
    """
    if op is torch.ops.aten.embedding.default:
        weight, indices = args[:2]
        return weight.new_empty((*indices.shape, weight.shape[1]))
    if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        x, weight = args[-2:]
        return x.new_empty((x.shape[0], weight.shape[1]))
    if not _small_on_meta(op, _tensors((args, kwargs))):
        return op(*args, **kwargs)
    # Indices are 0, which is in range; only elementwise ops may divide by an integer.
    of_integers = 1 if torch.Tag.pointwise in op.tags else 0

    def filled(x: torch.Tensor) -> torch.Tensor:
        return torch.full(x.shape, 1 if x.is_floating_point() else of_integers, dtype=x.dtype)

    args, kwargs = tree_map_only(torch.Tensor, filled, (args, kwargs))
    output = op(*args, **kwargs)
    return tree_map_only(torch.Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), output)


def _small_on_meta(op: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the CPU can compute the op instead: a function of PyTorch's own, of few values, whose shapes suffice."""
    if op.namespace != "aten" or op._schema.is_mutable or any(one.alias_info for one in op._schema.returns):
        return False
    if torch.Tag.dynamic_output_shape in op.tags or torch.Tag.data_dependent_output in op.tags:
        return False
    on_meta = any(x.is_meta for x in tensors) and all(x.is_meta or not x.ndim for x in tensors)
    return on_meta and sum(x.numel() for x in tensors) <= _MAX_VALUES


@contextmanager
def _meta_buffers(model: nn.Module) -> Iterator[None]:
    """Replaces the buffers by meta copies. `torch.func.functional_call` does not restore those of shared modules."""
    kept = [(owner, name, buffer) for owner in model.modules() for name, buffer in owner.named_buffers(recurse=False)]
    try:
        for owner, name, buffer in kept:
            setattr(owner, name, buffer.to("meta"))
        yield
    finally:
        for owner, name, buffer in kept:
            setattr(owner, name, buffer)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
