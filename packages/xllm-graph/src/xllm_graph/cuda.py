"""`CudaGraphRuntime`: CUDA graphs that share one memory pool. Owns the pool and the stream that captures run on."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar

import torch

from .memory import borrowed


class CudaGraphRuntime:
    """See `GraphRuntime`. One per device and executor; captures in one thread do not disturb work in another."""

    name: ClassVar[str] = "cuda"

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"device {device}; CUDA graphs serve ['cuda']")
        self.device = torch.empty(0, device=device).device  # with its index
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._open: torch.cuda.CUDAGraph | None = None
        self._in_session = False

    @contextmanager
    def session(self) -> Iterator[None]:
        """See `GraphRuntime.session`. Garbage collection is off: a finalizer could break a capture."""
        if self._in_session:
            raise RuntimeError("a capture session is open already")
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        gc.collect()
        collects = gc.isenabled()
        gc.disable()
        self._in_session = True
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream), torch.no_grad():
                try:
                    yield
                finally:
                    self._abandon()  # a capture must end on the stream that it began on
        finally:
            self._in_session = False
            if collects:
                gc.enable()
            torch.cuda.synchronize(self.device)
            # The caching allocator keeps the warm-up runs' memory for this stream, which nothing else uses.
            torch.cuda.empty_cache()

    def begin(self) -> None:
        """See `GraphRuntime.begin`."""
        if not self._in_session:
            raise RuntimeError("begin was called outside of a capture session")
        if self._open is not None:
            raise RuntimeError("begin was called inside of another capture")
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._open = graph

    def end(self) -> torch.cuda.CUDAGraph:
        """See `GraphRuntime.end`."""
        if self._open is None:
            raise RuntimeError("end was called without a capture")
        graph, self._open = self._open, None
        with warnings.catch_warnings():
            # A piece between two ops that are not captured may be empty.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            graph.capture_end()
        self._graphs.append(graph)
        return graph

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `GraphRuntime.borrow`."""
        return borrowed(tensor)

    def memory_bytes(self) -> int:
        """See `GraphRuntime.memory_bytes`."""
        pool = tuple(self._pool)
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == pool)

    def release(self) -> None:
        """See `GraphRuntime.release`. Waits for the device, which may still be replaying."""
        torch.cuda.synchronize(self.device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def _abandon(self) -> None:
        if self._open is None:
            return
        graph, self._open = self._open, None
        # Ending a broken capture raises; the caller gets the original error.
        with suppress(RuntimeError):
            graph.capture_end()
