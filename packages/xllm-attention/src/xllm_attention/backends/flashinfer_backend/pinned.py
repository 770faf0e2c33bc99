"""Pinned host buffers for plans. Owns the rule that none is overwritten while the device may still read it.

FlashInfer's plan writes its schedule into a pinned buffer and enqueues a copy from there. The next step may be planned
while the device has not reached that copy yet, so plans take turns on several buffers, each guarded by an event.
"""

from __future__ import annotations

import torch


class PinnedRing:
    """Buffers that are handed out in turn.

    Args:
        num_buffers: twice the plans of one step, so that a step ahead of the device never waits.
        num_bytes: of each.
    """

    def __init__(self, num_buffers: int, num_bytes: int) -> None:
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(num_buffers)]
        self._events = [torch.cuda.Event() for _ in range(num_buffers)]  # type: ignore[no-untyped-call]
        self._next = 0

    def take(self) -> torch.Tensor:
        """The next buffer. Waits only when the host is so far ahead that the device has not read it yet."""
        event = self._events[self._next]
        if not event.query():  # type: ignore[no-untyped-call]
            event.synchronize()
        return self._buffers[self._next]

    def taken(self) -> None:
        """Says that the copy from the buffer last taken is enqueued on the current stream."""
        self._events[self._next].record()
        self._next = (self._next + 1) % len(self._buffers)
