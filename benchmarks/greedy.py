"""Greedy sampling for a host: each row's most likely token, written to memory that the host reads.

Stands for the sampler of a serving framework, which has one of its own: on a CUDA device a single launch, behind which
nothing needs to be copied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PARTS = 16  # programs a row: one of 150,000 numbers keeps a multiprocessor busy too long
BLOCK = 2048


class Greedy:
    """Picks tokens of up to `max_rows` rows of logits.

    Args:
        max_rows: rows of a call at most.
        device: where logits lie.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._tokens = torch.empty(max_rows, dtype=torch.int32, pin_memory=on_cuda)
        self._values = torch.empty((max_rows, PARTS), dtype=torch.float32, device=device)
        self._indices = torch.empty((max_rows, PARTS), dtype=torch.int32, device=device)
        self._arrived = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._launches = on_cuda

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """The index of the largest of each row [n, vocab], the first of equals, NaN aside: [n] int32 on the host.

        There once the device is through, and until the next call.
        """
        tokens = self._tokens[: logits.shape[0]]
        if self._launches:
            pick(logits, tokens, self._values, self._indices, self._arrived)
        else:
            tokens.copy_(logits.argmax(dim=-1))
        return tokens


def pick(
    logits: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, arrived: torch.Tensor
) -> None:
    """Writes the picks of logits [n, vocab] to tokens [n].

    Of scratch it takes values and indices [at least n, PARTS] and arrived [at least n], which is 0 between calls.
    """
    num_rows, vocabulary = logits.shape
    span = -(-vocabulary // (PARTS * BLOCK)) * BLOCK
    _pick_kernel[(PARTS, num_rows)](
        logits, tokens, values, indices, arrived, vocabulary, logits.stride(0), span, PARTS, BLOCK, num_warps=4
    )


@triton.jit  # type: ignore[untyped-decorator]
def _pick_kernel(
    logits: tl.tensor, tokens: tl.tensor, values: tl.tensor, indices: tl.tensor, arrived: tl.tensor,
    vocabulary: tl.constexpr, stride: tl.constexpr, span: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """A program finds the largest of its part of a row; the row's last one to end picks among the parts."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.full([BLOCK], vocabulary, tl.int32)
    for start in range(0, span, BLOCK):
        index = part * span + start + tl.arange(0, BLOCK)
        value = tl.load(logits + row * stride + index, mask=index < vocabulary, other=float("-inf")).to(tl.float32)
        more = value > best
        best = tl.where(more, value, best)
        place = tl.where(more, index, place)
    top = tl.max(best, 0)
    tl.store(values + row * PARTS + part, top)
    tl.store(indices + row * PARTS + part, tl.min(tl.where(best == top, place, vocabulary), 0))
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
        parts = row * PARTS + tl.arange(0, PARTS)
        tops = tl.load(values + parts, cache_modifier=".cg")
        firsts = tl.load(indices + parts, cache_modifier=".cg")
        picked = tl.min(tl.where(tops == tl.max(tops, 0), firsts, vocabulary), 0)
        tl.store(tokens + row, tl.minimum(picked, vocabulary - 1))
        tl.store(arrived + row, 0)
