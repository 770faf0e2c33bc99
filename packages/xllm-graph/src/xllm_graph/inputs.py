"""A step's tokens at fixed addresses: ids, positions, wanted rows. Owns the buffers and their padding."""

from __future__ import annotations

import torch

POISON = 0x7F7F7F7F


class TokenInputs:
    """Persistent token ids, positions and wanted rows of a step.

    Args:
        max_num_tokens: T at most, padding included.
        device: of the buffers.
    """

    def __init__(self, max_num_tokens: int, device: torch.device) -> None:
        self._buffer = torch.zeros((3, max_num_tokens), dtype=torch.int32, device=device)
        self._zeros = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        self.tokens, self.positions, self.rows = self._buffer.unbind()  # [max_num_tokens] int32 each
        self.no_rows = self._zeros[:0]

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
        for buffer, source in ((self.tokens, tokens), (self.positions, positions), (self.rows, rows)):
            if source is None:
                continue
            live = source.shape[0]
            if live:
                pairs.append((buffer[:live], source))
            if live < num_tokens:
                pairs.append((buffer[live:num_tokens], self._zeros[live:num_tokens]))
        return pairs

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
