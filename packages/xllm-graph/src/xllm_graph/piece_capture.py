"""`PieceCapture`: captures a forward pass as a chain of graphs, cut at the ops that no graph can hold.

Owns the dispatch mode that ends a capture at such an op, runs the op, and begins the next capture. Without
torch.compile, and without knowing the model: whatever ops it dispatches are seen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from xllm_attention.op_library import collective_ops

from .runtime import GraphRuntime


class PieceCapture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turns one forward pass into `calls`: graph, op, graph, ..., which repeat it when called in order.

    The op of a call is made with the tensors it had during the capture, whose memory belongs to the pool. What an op
    returns is copied to where the following graphs read it.

    Args:
        runtime: in an open session.
        cut_ops: names of ops to cut at, besides those tagged `cudagraph_unsafe`.
        cut_collectives: cut at every op that is defined as a collective (`xllm_attention.op_library`).
    """

    def __init__(self, runtime: GraphRuntime, cut_ops: Collection[str], *, cut_collectives: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._runtime = runtime
        self._cut_ops = frozenset(cut_ops) | (collective_ops() if cut_collectives else frozenset())
        self._pool_addresses: set[int] = set()
        self._num_ops = 0  # of the open piece
        self.calls: list[Callable[[], object]] = []
        self.num_graphs = 0

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Captures what the block dispatches."""
        self._begin()
        with self:
            yield
        self._end()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.cudagraph_unsafe not in func.tags and func._schema.name not in self._cut_ops:
            result = func(*args, **kwargs)
            self._num_ops += 1
            self._pool_addresses |= _addresses(result) - _addresses((args, kwargs))
            return result
        self._end()
        result = func(*args, **kwargs)
        self._append_call(func, args, kwargs, result)
        self._begin()
        return result

    def _begin(self) -> None:
        self._num_ops = 0
        self._runtime.begin()

    def _end(self) -> None:
        graph = self._runtime.end()
        if self._num_ops:
            self.calls.append(graph.replay)
            self.num_graphs += 1

    def _append_call(
        self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: object
    ) -> None:
        inputs = _addresses((args, kwargs))
        # Held, not borrowed: an op outside of a graph takes its results' memory from elsewhere.
        outputs = [tensor for tensor in tree_iter(result) if isinstance(tensor, torch.Tensor)]
        outputs = [tensor for tensor in outputs if _address(tensor) not in inputs]
        args, kwargs = tree_map_only(torch.Tensor, self._borrow_if_pooled, (tuple(args), dict(kwargs)))
        call = partial(func, *args, **kwargs)
        self.calls.append(partial(_call_into, call, outputs, inputs) if outputs else call)

    def _borrow_if_pooled(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor for replays. Memory of the pool is borrowed, so that later pieces may reuse it."""
        return self._runtime.borrow(tensor) if _address(tensor) in self._pool_addresses else tensor


def checked_ops(names: Collection[str]) -> frozenset[str]:
    """The names as a set. Raises `ValueError` for one that no registered op has."""
    for name in names:
        namespace, _, op = name.partition("::")
        if not op or not hasattr(getattr(torch.ops, namespace), op):
            raise ValueError(f"cut_ops has {name!r}; no such op is registered")
    return frozenset(names)


def _call_into(call: Callable[[], object], targets: Sequence[torch.Tensor], inputs: Collection[int]) -> None:
    results = [tensor for tensor in tree_iter(call()) if isinstance(tensor, torch.Tensor)]
    outputs = [tensor for tensor in results if _address(tensor) not in inputs]
    for target, tensor in zip(targets, outputs, strict=True):
        target.copy_(tensor)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _addresses(values: object) -> set[int]:
    return {_address(tensor) for tensor in tree_iter(values) if isinstance(tensor, torch.Tensor)}
