"""Time and memory of captures, per runner."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

from .runtime import GraphRuntime


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """One captured size of a runner."""

    runner: str
    size: int  # rows or tokens
    num_graphs: int  # 1, or the pieces
    seconds: float  # warm-up run included
    memory_bytes: int  # by which the pool grew

    def as_dict(self) -> dict[str, object]:
        """Plain values for statistics."""
        return asdict(self)


OnCapture = Callable[[CaptureReport], None]
"""Called after each captured size, to show progress."""


class CaptureLog:
    """The reports of one runner, in capture order."""

    def __init__(self, runner: str, runtime: GraphRuntime) -> None:
        self._runner = runner
        self._runtime = runtime
        self._on_capture: OnCapture | None = None
        self.reports: list[CaptureReport] = []

    @contextmanager
    def warmup(self, on_capture: OnCapture | None, release: Callable[[], None]) -> Iterator[None]:
        """Calls `on_capture` for each capture inside the block. A failure calls `release`, so that a retry may follow.

        Raises:
            RuntimeError: a warm-up has succeeded before.
        """
        if self.reports:
            raise RuntimeError(f"warmup of {self._runner} was called before: graphs are captured once")
        self._on_capture = on_capture
        try:
            with ExitStack() as undo:
                undo.callback(release)
                yield
                undo.pop_all()
        finally:
            self._on_capture = None

    @contextmanager
    def measure(self, size: int, num_graphs: Callable[[], int]) -> Iterator[None]:
        """Reports the capture that happens inside the block."""
        start, before = time.perf_counter(), self._runtime.memory_bytes()
        yield
        report = CaptureReport(
            runner=self._runner,
            size=size,
            num_graphs=num_graphs(),
            seconds=time.perf_counter() - start,
            memory_bytes=self._runtime.memory_bytes() - before,
        )
        self.reports.append(report)
        if self._on_capture is not None:
            self._on_capture(report)
