"""`EagerRunner`: runs the model op by op. Owns nothing between steps."""

from __future__ import annotations

import torch

from xllm_attention import forward_context
from xllm_metadata import AttentionMetadata

from .runner import ModelCalls


class EagerRunner:
    """Plans once, then calls the model. See `Runner.execute` for shapes.

    Args:
        calls: the model and its attention backend.
    """

    name = "eager"

    def __init__(self, calls: ModelCalls) -> None:
        # Attributes of their own, since every step reads them.
        self._forward = calls.forward
        self._compute_logits = calls.compute_logits
        self._backend = calls.backend

    # Not inference_mode: its results refuse in-place updates outside of it, and hosts scale and mask logits in place.
    @torch.no_grad()
    def execute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor | None,
    ) -> torch.Tensor:
        """Runs one step eagerly. Every result is a fresh tensor, so that it stays valid beyond the next step too."""
        self._backend.plan(metadata)
        with forward_context(self._backend):
            hidden = self._forward(tokens, positions)
            if logits_indices is None:
                return hidden
            return self._compute_logits(hidden, logits_indices)
