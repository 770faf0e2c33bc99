"""`GraphRuntime`: what a runner needs of a device that can capture and replay, and how one is found.

Owns the protocol, the table of built-in runtimes and the reading of the entry-point group `xllm.graph_runtimes`, whose
values name classes that are made with the device alone. Knows no runner. Nothing is imported before it is asked for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

import torch

ENTRY_POINT_GROUP = "xllm.graph_runtimes"

_BUILT_IN = (
    EntryPoint("recorded", "xllm_graph.recorded:RecordedGraphRuntime", ENTRY_POINT_GROUP),
    EntryPoint("cuda", "xllm_graph.cuda:CudaGraphRuntime", ENTRY_POINT_GROUP),
)


class CaptureError(RuntimeError):
    """What ran during a capture cannot be part of a graph. The message names the Python line that did it."""


class Graph(Protocol):
    """A captured sequence of device work."""

    def replay(self) -> None:
        """Enqueues the work on the current stream, at the captured addresses; without gradients in any grad mode."""
        ...


class GraphRuntime(Protocol):
    """Captures device work into graphs that share one memory pool.

    A graph's memory is reused by the other graphs of the pool: what it computed is valid until one of them replays.
    Graphs are replayed one after another on one stream, and those that hand values to each other in capture order.
    """

    @property
    def name(self) -> str:
        """The name it is asked for by."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it captures."""
        ...

    def session(self) -> AbstractContextManager[None]:
        """Surrounds warm-up runs and captures, all on a stream apart, after the current stream's work.

        The device is done with them when it is left, so that the first step may come on any stream.
        A capture that is still open when the session is left, since the captured code failed, is abandoned.
        """
        ...

    def begin(self) -> None:
        """Starts a capture. Raises `RuntimeError` outside of a session or inside of another capture."""
        ...

    def end(self) -> Graph:
        """Ends the capture. Raises `RuntimeError` when none is open."""
        ...

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory and layout without ownership, for a tensor of the pool.

        Its memory stays mapped while the runtime lives, but later captures may use it.
        """
        ...

    def memory_bytes(self) -> int:
        """Device memory that the pool holds."""
        ...

    def release(self) -> None:
        """Drops the graphs and the pool. None of them may be replayed afterwards; others may be captured."""
        ...


def available_runtimes() -> tuple[str, ...]:
    """Names that `create_runtime` knows, sorted. Whether the device is there shows when one is made."""
    return tuple(sorted(_points()))


def create_runtime(name: str, device: torch.device | str) -> GraphRuntime:
    """Makes the runtime `name` for a device.

    Raises:
        ValueError: an unknown name (lists the known ones), or a device that the runtime does not serve.
    """
    points = _points()
    if name not in points:
        raise ValueError(f"no graph runtime {name!r}; available are {sorted(points)}")
    runtime: GraphRuntime = points[name].load()(torch.device(device))
    return runtime


def _points() -> dict[str, EntryPoint]:
    points: dict[str, EntryPoint] = {}
    for point in (*_BUILT_IN, *entry_points(group=ENTRY_POINT_GROUP)):
        if point.name in points:
            raise ValueError(f"graph runtime {point.name!r} is declared twice, the second time as {point.value}")
        points[point.name] = point
    return points
