"""`GraphRuntime`: the protocol of capture and replay on a device, and the lookup of runtimes by name.

Runtimes are built in, or declared under the entry-point group `xllm.graph_runtimes`. Such a class is called with the
device alone, and is imported when it is asked for.
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
    """The captured code did something that a graph cannot hold. The message names the Python line."""


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
        """The name under which it is registered."""
        ...

    @property
    def device(self) -> torch.device:
        """The device that it captures on."""
        ...

    def session(self) -> AbstractContextManager[None]:
        """Surrounds warm-up runs and captures, which run on a separate stream after the current stream's work.

        At its end the device has finished them, so the first step may run on any stream. A capture that is still open
        then, because the captured code failed, is abandoned.
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
