"""Greedy sampling: each row's most likely token, on the device for the next step and in pinned memory for the host.

It takes the part of a serving framework's sampler. On CUDA it is one kernel, which writes both and needs no copy.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

PARTS = 16  # programs per row: one program would take too long for 150,000 logits
BLOCK = 2048


class Picked:
    """Sampled tokens, valid after the device has reached their event."""

    def __init__(self, on_host: np.ndarray, event: torch.cuda.Event | None) -> None:
        self._on_host = on_host
        self._event = event

    def wait(self) -> np.ndarray:
        """Waits for the device; returns the tokens [n] int32, in memory that is reused two indices later."""
        if self._event is not None:
            self._event.synchronize()
        return self._on_host


class Greedy:
    """Picks tokens of up to `max_rows` rows of logits.

    Args:
        max_rows: most rows of a step.
        device: device of the logits.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._tokens = torch.empty(max_rows, dtype=torch.int32, device=device)
        # Double buffer: the host reads one step's tokens while the device samples the next one's.
        self._on_host = torch.empty((2, max_rows), dtype=torch.int32, pin_memory=on_cuda)
        self._numbers = self._on_host.numpy()
        self._values = torch.empty((max_rows, PARTS), dtype=torch.float32, device=device)
        self._indices = torch.empty((max_rows, PARTS), dtype=torch.int32, device=device)
        self._arrived = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._events = [torch.cuda.Event() for _ in range(2)] if on_cuda else None

    def __call__(self, logits: torch.Tensor, rows: slice, index: int) -> Picked:
        """Index of the largest logit of each row, the first one of equals; rows hold no NaN.

        Args:
            logits: [n, vocab].
            rows: their n rows among `max_rows`.
            index: position of the tokens in the output.
        """
        turn = index % 2
        on_device, on_host = self._tokens[rows], self._on_host[turn, rows]
        event = None
        if self._events is None:
            on_device.copy_(logits.argmax(dim=-1))
            on_host.copy_(on_device)
        else:
            pick(logits, on_device, on_host, self._values, self._indices, self._arrived)
            event = self._events[turn]
            event.record()
        return Picked(self._numbers[turn, rows], event)

    def last(self, rows: slice) -> torch.Tensor:
        """Device buffer of the last tokens of these rows: [n] int32, ordered on the stream of the calls."""
        return self._tokens[rows]


def pick(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    on_host: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
    arrived: torch.Tensor,
) -> None:
    """Samples logits [n, vocab] to tokens [n], on the device, and to on_host [n], in pinned memory.

    Scratch: values and indices [at least n, PARTS], and arrived [at least n], which is 0 between calls.
    """
    num_rows, vocabulary = logits.shape
    chunk = -(-vocabulary // (PARTS * BLOCK)) * BLOCK
    _pick_kernel[(PARTS, num_rows)](
        logits,
        tokens,
        on_host,
        values,
        indices,
        arrived,
        vocabulary,
        logits.stride(0),
        chunk,
        PARTS,
        BLOCK,
        num_warps=4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _pick_kernel(
    logits: tl.tensor, tokens: tl.tensor, on_host: tl.tensor, values: tl.tensor, indices: tl.tensor,
    arrived: tl.tensor, vocabulary: tl.constexpr, stride: tl.constexpr, chunk: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """A program reduces one chunk of a row; the row's last program to finish reduces the chunks' results."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    position = tl.full([BLOCK], vocabulary, tl.int32)
    for start in range(0, chunk, BLOCK):
        index = part * chunk + start + tl.arange(0, BLOCK)
        value = tl.load(logits + row * stride + index, mask=index < vocabulary, other=float("-inf")).to(tl.float32)
        more = value > best
        best = tl.where(more, value, best)
        position = tl.where(more, index, position)
    top = tl.max(best, 0)
    tl.store(values + row * PARTS + part, top)
    tl.store(indices + row * PARTS + part, tl.min(tl.where(best == top, position, vocabulary), 0))
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
        parts = row * PARTS + tl.arange(0, PARTS)
        tops = tl.load(values + parts, cache_modifier=".cg")
        firsts = tl.load(indices + parts, cache_modifier=".cg")
        picked = tl.minimum(tl.min(tl.where(tops == tl.max(tops, 0), firsts, vocabulary), 0), vocabulary - 1)
        tl.store(tokens + row, picked)
        tl.store(on_host + row, picked)
        tl.store(arrived + row, 0)
