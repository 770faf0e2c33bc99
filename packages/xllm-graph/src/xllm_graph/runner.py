"""The `Runner` protocol, the reasons for eager steps, and the step counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from xllm_attention import AttentionBackend
from xllm_metadata import AttentionMetadata

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(tokens [T], positions [T]) -> hidden states [T, hidden]."""

ComputeLogits = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(hidden states [T, hidden], indices [n] or None) -> logits [n, vocab], of all rows when indices is None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCalls:
    """What every runner calls: the model's two callables and the attention backend that serves its layers.

    The backend's caches are bound before a runner is made, since runners read its limits and page size.
    """

    forward: Forward
    compute_logits: ComputeLogits
    backend: AttentionBackend


class EagerReason(Enum):
    """Why a step ran eagerly. There is no eager step without one of these."""

    GRAPHS_OFF = "graphs_off"  # the configuration asks for no graph
    NOT_WARMED_UP = "not_warmed_up"  # no graph is captured yet
    OVER_TOKEN_BUDGET = "over_token_budget"  # more tokens than the largest captured bucket
    # Why a step did not run as one full graph. Such a step is eager only where it cannot run piecewise either.
    NOT_DECODE = "not_decode"  # only decode steps are captured whole
    OVER_GRAPH_BUCKETS = "over_graph_buckets"  # more sequences than the largest captured bucket
    OPS_NOT_CAPTURED = "ops_not_captured"  # the configuration names ops of the model that no graph may hold
    BACKEND_CANNOT_CAPTURE = "backend_cannot_capture"  # the attention backend serves no full graph of decode


class StepStats:
    """Counts the steps of an executor: by runner, and the eager ones by reason. A count means a finished step."""

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter()
        self.eager_reasons: Counter[str] = Counter()
        self.misses: dict[str, Counter[str]] = {}  # by runner: steps that a graph of another runner served, by reason

    def count(self, runner: str, reason: EagerReason | None = None) -> None:
        """Counts one step; `reason` is given exactly when it ran eagerly."""
        self.steps[runner] += 1
        if reason is not None:
            self.eager_reasons[reason.value] += 1

    def count_misses(self, misses: Iterable[tuple[str, EagerReason]]) -> None:
        """Counts the runners that would have come before the one that ran a step, each with its reason."""
        for runner, reason in misses:
            if reason is not EagerReason.NOT_DECODE:  # expected: a prefill is no miss
                self.misses.setdefault(runner, Counter())[reason.value] += 1


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
