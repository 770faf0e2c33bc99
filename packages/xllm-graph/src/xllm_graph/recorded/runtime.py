"""`RecordedGraphRuntime`: records the ops that are dispatched during a capture, and replays exactly those.

Owns the recording mode and the replay. Every result of a recorded op is in the pool. The ops of a graph, and all
graphs, share its memory, as they do with a device's graph allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from ..memory import SERVED_DEVICES, shaped_as
from .launches import Launch, watched_launches
from .pool import Block, BlockPool, poison
from .refusals import HostReadGuard, check_op, check_result

_UNDEFINED = frozenset(
    overload
    for packet in (torch.ops.aten.empty, torch.ops.aten.empty_strided, torch.ops.aten.empty_like,
                   torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided)
    for overload in (getattr(packet, name) for name in packet.overloads())  # type: ignore[no-untyped-call]
)  # fmt: skip


class RecordedGraph:
    """Ops with the memory they were recorded on."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._readable = pool.addresses_in_use()  # blocks that hold results of earlier graphs, which this one may read
        self._steps: list[Callable[[], None]] = []
        self._written: dict[int, Block] = {}

    def __len__(self) -> int:
        return len(self._steps)

    @torch.no_grad()
    def replay(self) -> None:
        """Runs the ops again. What the pool holds of other graphs is overwritten first."""
        self._pool.poison_except(self._readable)
        for step in self._steps:
            step()
        self.mark_dirty()

    def mark_dirty(self) -> None:
        """Notes that the graph has written its blocks."""
        for block in self._written.values():
            block.dirty = True

    def writes(self, tensor: torch.Tensor) -> None:
        """Notes that an op of the graph writes the memory of `tensor`."""
        block = self._pool.block_of(tensor)
        if block is not None:
            self._written[block.address] = block

    def append(self, step: Callable[[], None]) -> None:
        """Adds one op."""
        self._steps.append(step)


class RecordedGraphRuntime:
    """A capture and replay of its own on any device whose memory can be shared, see `GraphRuntime`.

    Unlike a device's capture, recording also runs the ops, once. Ops tagged `cudagraph_unsafe` are not recorded as
    such, since what they do may depend on more than their arguments: what they dispatch is. Every other op, in Python
    or not, is one entry.
    """

    name: ClassVar[str] = "recorded"

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        if self.device.type not in SERVED_DEVICES:
            raise ValueError(f"device {self.device}; recorded graphs serve {list(SERVED_DEVICES)}")
        self._pool = BlockPool(self.device)
        self._graph: RecordedGraph | None = None
        self._in_session = False
        self._paused = False  # inside of work that is one entry
        self._thread = get_ident()
        key = torch._C._parse_dispatch_key(self.device.type.upper())
        assert key is not None
        self._keys = torch._C.DispatchKeySet(key)

    @contextmanager
    def session(self) -> Iterator[None]:
        """See `GraphRuntime.session`."""
        if self._in_session:
            raise RuntimeError("a capture session is open already")
        self._in_session = True
        self._thread = get_ident()
        try:
            launches = watched_launches(self._launch)
            with torch.no_grad(), launches, _Recorder(self), self._guard():
                yield
        finally:
            self._in_session = False
            self._graph = None

    def begin(self) -> None:
        """See `GraphRuntime.begin`."""
        if not self._in_session:
            raise RuntimeError("begin was called outside of a capture session")
        if self._graph is not None:
            raise RuntimeError("begin was called inside of another capture")
        self._graph = RecordedGraph(self._pool)

    def end(self) -> RecordedGraph:
        """See `GraphRuntime.end`."""
        if self._graph is None:
            raise RuntimeError("end was called without a capture")
        graph, self._graph = self._graph, None
        graph.mark_dirty()
        return graph

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `GraphRuntime.borrow`. A tensor of other memory is returned as it is."""
        block = self._pool.block_of(tensor)
        return tensor if block is None else shaped_as(block.memory, tensor)

    def memory_bytes(self) -> int:
        """See `GraphRuntime.memory_bytes`."""
        return self._pool.num_bytes

    def release(self) -> None:
        """See `GraphRuntime.release`."""
        self._pool = BlockPool(self.device)

    def recording(self) -> bool:
        """Whether a capture is open, and this is the thread that it records."""
        return self._graph is not None and not self._paused and get_ident() == self._thread

    def record(self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs one op and appends it to the open capture; returns its result in memory of the pool."""
        assert self._graph is not None
        check_op(func)
        inputs = {_address(tensor) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        with self._pause():  # the op is one entry: ops that its CPU kernel dispatches are not recorded
            result = func(*args, **kwargs)
        check_result(func, result)
        outputs: list[torch.Tensor | None] = []  # for each tensor of the result: the pool memory that a replay writes

        def move_to_pool(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.numel() == 0 or _address(tensor) in inputs:
                outputs.append(None)
                return tensor
            placed = self._pool.allocate(tensor)
            placed.copy_(tensor)
            assert self._graph is not None
            self._graph.writes(placed)
            outputs.append(self.borrow(placed))
            return placed

        result = tree_map_only(torch.Tensor, move_to_pool, result)
        self._append(func, args, kwargs, outputs)
        return result

    def look_inside(self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs an op so that what it dispatches is recorded, not itself."""
        with _Recorder(self), self._guard():
            return func.redispatch(self._keys, *args, **kwargs)

    def _launch(self, launch: Launch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.recording():
            return launch(*args, **kwargs)
        graph = self._graph
        assert graph is not None
        with self._pause():
            result = launch(*args, **kwargs)
            for tensor in tree_iter((args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    graph.writes(tensor)  # the launch does not say which of them it writes
            args, kwargs = tree_map_only(torch.Tensor, self._snapshot, (args, kwargs))
        graph.append(lambda: launch(*args, **kwargs))
        return result

    @contextmanager
    def _pause(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _guard(self) -> HostReadGuard:
        return HostReadGuard(self.recording)

    def _append(
        self,
        func: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outputs: Sequence[torch.Tensor | None],
    ) -> None:
        graph = self._graph
        assert graph is not None
        targets = [tensor for tensor in outputs if tensor is not None]
        if func in _UNDEFINED:
            for target in targets:
                block = self._pool.block_of(target)
                assert block is not None
                graph.append(partial(poison, block.memory, target.dtype))
            return
        written = _written_arguments(func, args, kwargs)
        if not targets and not written:
            return  # a view: the recorded tensors alias already
        for tensor in written:
            graph.writes(tensor)
        # References that own nothing, so that the pool may reuse what the captured code has dropped.
        args, kwargs = tree_map_only(torch.Tensor, self._snapshot, (tuple(args), dict(kwargs)))

        def step() -> None:
            result = func(*args, **kwargs)
            tensors = (part for part in tree_iter(result) if isinstance(part, torch.Tensor))
            for target, tensor in zip(outputs, tensors, strict=False):
                if target is not None:
                    target.copy_(tensor)

        graph.append(step)

    def _snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        """An alias of the tensor with its present shape: a later resize does not reach the graph."""
        block = self._pool.block_of(tensor)
        if block is not None:
            return shaped_as(block.memory, tensor)
        return tensor if tensor.layout is not torch.strided else tensor.detach()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every dispatched op to the runtime while a capture is open."""

    def __init__(self, runtime: RecordedGraphRuntime) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._runtime = runtime

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self._runtime.recording():
            return func(*args, **kwargs)
        if torch.Tag.cudagraph_unsafe in func.tags:
            return self._runtime.look_inside(func, args, kwargs)
        return self._runtime.record(func, args, kwargs)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _written_arguments(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The tensors that the op's schema says it writes."""
    written: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        written += [tensor for tensor in tree_iter(value) if isinstance(tensor, torch.Tensor)]
    return written
