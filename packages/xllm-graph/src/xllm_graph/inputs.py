"""A step's tokens at fixed addresses: ids, positions, wanted rows. Owns the buffers and their padding."""

from __future__ import annotations

import torch

POISON = 0x7F7F7F7F
_MAX_PARTS = 1024  # kept; a step of another size costs the views again
_Parts = tuple[tuple[torch.Tensor, torch.Tensor], ...]


class TokenInputs:
    """Persistent token ids, positions and wanted rows of a step.

    Args:
        max_num_tokens: T at most, padding included.
        device: of the buffers.
    """

    def __init__(self, max_num_tokens: int, device: torch.device) -> None:
        # Ordinary tensors even when made in inference mode: later steps may not be.
        with torch.inference_mode(False):
            self._buffer = torch.zeros((3, max_num_tokens), dtype=torch.int32, device=device)
            self._zeros = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        self.tokens, self.positions, self.rows = self._buffer.unbind()  # [max_num_tokens] int32 each
        self.no_rows = self._zeros[:0]
        self._kept: dict[tuple[int, int], tuple[_Parts, torch.Tensor]] = {}

    def copies(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        num_tokens: int,
        rows: torch.Tensor | None = None,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What a step has to be copied from and to, padded with 0 to `num_tokens`, as (target, source) pairs.

        Args:
            tokens, positions: [T] int32.
            num_tokens: the padded size.
            rows: [n] int32, n at most `num_tokens`; None leaves them alone, which is for steps that select none.
        """
        pairs = []
        for index, source in enumerate((tokens, positions, rows)):
            if source is None:
                continue
            live = source.shape[0]
            parts, zeros = self._parts(live, num_tokens)
            target, tail = parts[index]
            if live:
                pairs.append((target, source))
            if live < num_tokens:
                pairs.append((tail, zeros))
        return pairs

    def _parts(self, live: int, padded: int) -> tuple[_Parts, torch.Tensor]:
        """Each buffer's (live part, tail), and what the tails are copied from; kept, as they cost more than copies."""
        known = self._kept.get((live, padded))
        if known is None:
            buffers = (self.tokens, self.positions, self.rows)
            known = tuple((buffer[:live], buffer[live:padded]) for buffer in buffers), self._zeros[live:padded]
            if len(self._kept) >= _MAX_PARTS:
                self._kept.clear()
            self._kept[live, padded] = known
        return known

    def fill(self, tokens: torch.Tensor, positions: torch.Tensor, num_tokens: int) -> None:
        """Copies a step's token ids and positions, see `copies`; one launch, and never waits for the device."""
        targets, sources = zip(*self.copies(tokens, positions, num_tokens), strict=True)
        torch._foreach_copy_(targets, sources, non_blocking=True)

    def views(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The leading `num_tokens` token ids and positions; equal sizes give equal addresses."""
        return self.tokens[:num_tokens], self.positions[:num_tokens]

    def poison(self) -> None:
        """Fills all buffers with large integers, which no model may see. For checks."""
        self._buffer.fill_(POISON)
