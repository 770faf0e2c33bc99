"""Turns SIGINT, SIGTERM and SIGHUP into an exception, so that every `with` block on the stack ends what it started."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A stop signal arrived. No `except Exception` catches it."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")


class StopSignals:
    """Raises `Stopped` in the main thread on the first stop signal, and ignores all later ones.

    So a second signal cannot interrupt the end of the worker. Signals that the caller ignores stay ignored.
    """

    def __init__(self) -> None:
        """Installs the handlers."""
        self._is_deferred = False
        self._pending: int | None = None
        for number in _STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Within the block a signal waits; it is raised at the end of the block."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
        if self._pending is not None:
            raise Stopped(self._pending)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._pending is not None:
            return
        self._pending = number
        if not self._is_deferred:
            raise Stopped(number)
