"""The `Runner` protocol and what its statistics mean. Owns no execution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Protocol

import torch

from xllm_metadata import AttentionMetadata

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(tokens [T], positions [T]) -> hidden states [T, hidden]."""

ComputeLogits = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(hidden states [T, hidden], indices [n] or None) -> logits [n, vocab], of all rows when indices is None."""


class EagerReason(Enum):
    """Why a step ran eagerly. There is no eager step without one of these."""

    GRAPHS_OFF = "graphs_off"  # the configuration asks for no graph


class StepStats:
    """Counts the steps of an executor: by runner, and the eager ones by reason. A count means a finished step."""

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter()
        self.eager_reasons: Counter[str] = Counter()

    def count(self, runner: str, reason: EagerReason | None = None) -> None:
        """Counts one step; `reason` is given exactly when it ran eagerly."""
        self.steps[runner] += 1
        if reason is not None:
            self.eager_reasons[reason.value] += 1


class Runner(Protocol):
    """Executes steps in one mode."""

    @property
    def name(self) -> str:
        """The key under which its steps are counted."""
        ...

    def execute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor | None,
    ) -> torch.Tensor:
        """Runs one step: plans attention, runs the model, computes logits.

        T tokens, n selected rows. Work is ordered on the current stream; the result is valid until the next execute.

        Args:
            tokens: [T] int32, device.
            positions: [T] int32, device.
            metadata: of the step.
            logits_indices: [n] int32 or int64, device: rows whose logits are wanted; None asks for hidden states.

        Returns:
            logits [n, vocab], or hidden states [T, hidden] when `logits_indices` is None; in the model's dtype.
        """
        ...
