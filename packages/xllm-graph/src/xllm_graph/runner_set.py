"""`RunnerSet`: dispatches each step to a runner, and counts steps by runner and reason.

Owns the order of preference, the counts and the release of graphs. The decision reads only the step's phase and number
of tokens, which are the same on all ranks. So all ranks of a group run a step the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch

from xllm_attention import Phase
from xllm_metadata import AttentionMetadata

from .report import CaptureReport, OnCapture
from .runner import EagerReason, Runner, StepStats
from .runtime import GraphRuntime


class CapturingRunner(Runner, Protocol):
    """A runner that captures during warm-up, and serves some steps only."""

    @property
    def num_captures(self) -> int:
        """Number of sizes that `warmup` captures."""
        ...

    @property
    def reports(self) -> Sequence[CaptureReport]:
        """Time and memory of each capture."""
        ...

    def refusal(self, phase: Phase, num_tokens: int) -> EagerReason | None:
        """Why this runner cannot serve a step; None if it can."""
        ...

    def warmup(self, on_capture: OnCapture | None = None) -> None:
        """Captures everything. If it fails, nothing remains captured, and it may be tried again."""
        ...

    def release(self) -> None:
        """Drops the captured graphs and their reports."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """The runner of a step, and why the preferred runners do not serve it."""

    runner: Runner
    misses: tuple[tuple[str, EagerReason], ...] = ()  # preferred runners that refused, with their reasons
    eager_reason: EagerReason | None = None  # set if and only if the step runs eagerly


class RunnerSet:
    """Runs every step on the first runner that serves it, else eagerly and for a counted reason.

    Args:
        eager: serves every step.
        preferred: in order of preference; warmed up in reverse, since the last one has the largest graphs.
        runtime: owns the pool that the graphs share, if any.
        eager_is_error: a step that none of `preferred` serves is an error instead of an eager step.
        misses: runners for decode steps that would come first but could not be made, with the reasons.
    """

    def __init__(
        self,
        eager: Runner,
        preferred: Sequence[CapturingRunner] = (),
        *,
        runtime: GraphRuntime | None = None,
        eager_is_error: bool = False,
        misses: Sequence[tuple[str, EagerReason]] = (),
    ) -> None:
        self.eager = eager
        self._preferred = tuple(preferred)
        self._runtime = runtime
        self._eager_is_error = eager_is_error
        self._misses = tuple(misses)
        # By whether it is a decode step, and the refusals that led to each.
        self._dispatches: dict[tuple[bool, tuple[EagerReason, ...]], Dispatch] = {}
        self.stats = StepStats()

    @property
    def num_captures(self) -> int:
        """How many times `warmup` will call `on_capture`."""
        return sum(runner.num_captures for runner in self._preferred)

    @property
    def reports(self) -> tuple[CaptureReport, ...]:
        """What each capture cost, in capture order."""
        return tuple(report for runner in reversed(self._preferred) for report in runner.reports)

    @property
    def memory_bytes(self) -> int:
        """Device memory of the graphs' pool."""
        return 0 if self._runtime is None else self._runtime.memory_bytes()

    def warmup(self, on_capture: OnCapture | None = None) -> None:
        """Captures everything that the preferred runners serve; all of it, or nothing when a capture fails."""
        with ExitStack() as undo:
            if not self.reports:  # else this one is refused
                undo.callback(self.release)
            for runner in reversed(self._preferred):
                runner.warmup(on_capture)
            undo.pop_all()

    def dispatch(self, phase: Phase, num_tokens: int) -> Dispatch:
        """Selects the runner for a phase and a number of tokens."""
        refusals = []
        for runner in self._preferred:
            reason = runner.refusal(phase, num_tokens)
            if reason is None:
                break
            refusals.append(reason)
        key = phase is Phase.DECODE, tuple(refusals)
        dispatch = self._dispatches.get(key)
        if dispatch is None:
            dispatch = self._dispatches[key] = self._dispatch_after(*key)
        return dispatch

    def _dispatch_after(self, is_decode: bool, refusals: tuple[EagerReason, ...]) -> Dispatch:
        """Selects the runner after the first `len(refusals)` preferred runners have refused the step."""
        refused = self._preferred[: len(refusals)]
        misses = (
            *((name, reason if is_decode else EagerReason.NOT_DECODE) for name, reason in self._misses),
            *((runner.name, reason) for runner, reason in zip(refused, refusals, strict=True)),
        )
        if len(refused) < len(self._preferred):
            return Dispatch(runner=self._preferred[len(refused)], misses=misses)
        reason = misses[-1][1] if misses else EagerReason.GRAPHS_OFF
        return Dispatch(runner=self.eager, misses=misses, eager_reason=reason)

    def execute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor | None,
    ) -> torch.Tensor:
        """Runs one step; see `Runner.execute`.

        Raises:
            RuntimeError: the step would run eagerly, which `eager_is_error` forbids. Nothing has run then.
        """
        dispatch = self.dispatch(Phase.of(metadata), tokens.shape[0])
        if self._eager_is_error and dispatch.eager_reason not in (None, EagerReason.GRAPHS_OFF):
            reasons = ", ".join(f"{runner}: {reason.value}" for runner, reason in dispatch.misses)
            raise RuntimeError(f"a step of {tokens.shape[0]} tokens would run eagerly ({reasons})")
        result = dispatch.runner.execute(tokens, positions, metadata, logits_indices)
        self.stats.count(dispatch.runner.name, dispatch.eager_reason)
        if dispatch.eager_reason is None:
            self.stats.count_misses(dispatch.misses)
        return result

    def release(self) -> None:
        """Drops all graphs, then their memory."""
        for runner in self._preferred:
            runner.release()
        if self._runtime is not None:
            self._runtime.release()
