"""Token ids and positions at fixed addresses. Owns the two buffers and their padding."""

from __future__ import annotations

import torch

POISON = 0x7F7F7F7F


class TokenInputs:
    """Persistent token ids and positions of a step.

    Args:
        max_num_tokens: T at most, padding included.
        device: of the buffers.
    """

    def __init__(self, max_num_tokens: int, device: torch.device) -> None:
        self._buffer = torch.zeros((2, max_num_tokens), dtype=torch.int32, device=device)
        self.tokens, self.positions = self._buffer.unbind()  # [max_num_tokens] int32 each

    def fill(self, tokens: torch.Tensor, positions: torch.Tensor, num_tokens: int) -> None:
        """Copies a step's [T] int32 token ids and positions, and pads them with 0 to `num_tokens`."""
        live = tokens.shape[0]
        self.tokens[:live].copy_(tokens, non_blocking=True)
        self.positions[:live].copy_(positions, non_blocking=True)
        if live < num_tokens:
            self._buffer[:, live:num_tokens].zero_()

    def views(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The leading `num_tokens` token ids and positions; equal sizes give equal addresses."""
        return self.tokens[:num_tokens], self.positions[:num_tokens]

    def poison(self) -> None:
        """Fills both buffers with large integers, which no model may see. For checks."""
        self._buffer.fill_(POISON)
