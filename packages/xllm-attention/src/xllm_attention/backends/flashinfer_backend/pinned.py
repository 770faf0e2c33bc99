"""Ring of pinned host buffers for plans. None is overwritten while the device may still read it.

FlashInfer's plan writes its schedule into a pinned buffer and enqueues a copy from there. The next step may be planned
before the device has reached that copy. So plans rotate through several buffers, each guarded by a CUDA event.
"""

from __future__ import annotations

import torch


class PinnedRing:
    """Pinned buffers, handed out in rotation.

    Args:
        num_buffers: twice the plans of one step, so that planning one step early never waits.
        num_bytes: of each.
    """

    def __init__(self, num_buffers: int, num_bytes: int) -> None:
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(num_buffers)]
        self._events = [torch.cuda.Event() for _ in range(num_buffers)]  # type: ignore[no-untyped-call]
        self._next = 0

    def take(self) -> torch.Tensor:
        """The next buffer. Waits only if the device has not yet read its previous contents."""
        event = self._events[self._next]
        if not event.query():  # type: ignore[no-untyped-call]
            event.synchronize()
        return self._buffers[self._next]

    def taken(self) -> None:
        """Records the event of the last buffer, after its copy was enqueued on the current stream."""
        self._events[self._next].record()
        self._next = (self._next + 1) % len(self._buffers)
