"""Static input buffers of a graph runner: token ids, positions and logits_indices, with their padding."""

from __future__ import annotations

import torch

POISON = 0x7F7F7F7F
_MAX_PARTS = 1024  # cached sizes; a step of another size makes its views again
_Parts = tuple[tuple[torch.Tensor, torch.Tensor], ...]


class TokenInputs:
    """Token ids, positions and logits_indices at addresses that graphs capture.

    Args:
        max_num_tokens: T at most, padding included.
        device: of the buffers.
    """

    def __init__(self, max_num_tokens: int, device: torch.device) -> None:
        # Ordinary tensors even when made in inference mode: later steps may not be.
        with torch.inference_mode(False):
            self._buffer = torch.zeros((3, max_num_tokens), dtype=torch.int32, device=device)
            self._zeros = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        self.tokens, self.positions, self.logits_indices = self._buffer.unbind()  # [max_num_tokens] int32 each
        self.no_indices = self._zeros[:0]
        self._kept: dict[tuple[int, int], tuple[_Parts, torch.Tensor]] = {}

    def copies(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        num_tokens: int,
        logits_indices: torch.Tensor | None = None,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The (target, source) pairs that copy a step into the buffers, padded with 0 to `num_tokens`.

        Args:
            tokens, positions: [T] int32.
            num_tokens: the padded size.
            logits_indices: [n] int32, n at most `num_tokens`; None leaves that buffer as it is.
        """
        pairs = []
        for index, source in enumerate((tokens, positions, logits_indices)):
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
        """Each buffer's (live, padding) rows and the zeros for the padding. Cached: slicing costs more than a copy."""
        known = self._kept.get((live, padded))
        if known is None:
            buffers = (self.tokens, self.positions, self.logits_indices)
            known = tuple((buffer[:live], buffer[live:padded]) for buffer in buffers), self._zeros[live:padded]
            if len(self._kept) >= _MAX_PARTS:
                self._kept.clear()
            self._kept[live, padded] = known
        return known

    def fill(self, tokens: torch.Tensor, positions: torch.Tensor, num_tokens: int) -> None:
        """Copies a step's token ids and positions, see `copies`, in one launch without waiting for the device."""
        targets, sources = zip(*self.copies(tokens, positions, num_tokens), strict=True)
        torch._foreach_copy_(targets, sources, non_blocking=True)

    def views(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The leading `num_tokens` token ids and positions; equal sizes give equal addresses."""
        return self.tokens[:num_tokens], self.positions[:num_tokens]

    def poison(self) -> None:
        """Fills all buffers with large integers, which no model may see. For checks."""
        self._buffer.fill_(POISON)
