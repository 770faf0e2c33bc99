"""`PiecewiseGraphRunner`: any step as a chain of graphs with attention run between them, by bucket of tokens.

Owns the token inputs, the chains and their outputs. How a chain is cut belongs to `piece_capture`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from xllm_attention import Phase, forward_context
from xllm_metadata import AttentionMetadata

from .buckets import bucket_for, checked_buckets
from .dummy_batch import dummy_batch, empty_batch
from .inputs import TokenInputs
from .piece_capture import PieceCapture, checked_ops
from .report import CaptureLog, CaptureReport, OnCapture
from .runner import EagerReason, ModelCalls
from .runtime import GraphRuntime


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    """One bucket's graphs and eager ops, called in order, and its output tensor."""

    calls: tuple[Callable[[], object], ...]
    num_graphs: int
    hidden: torch.Tensor  # [bucket, hidden], memory that the pool's other graphs overwrite


class PiecewiseGraphRunner:
    """Runs any step: prefill, chunks, mixed batches, several tokens a sequence in decode, and plain decode.

    Only token ids and positions are padded. Attention and cache writes see the step's true tokens, and attention's
    output is 0 in the padded rows. The head runs after the chain, on the selected rows. Shapes: `Runner.execute`.

    Args:
        calls: the model and its attention backend, whose limits must hold the largest bucket.
        runtime: captures and replays.
        buckets: rising numbers of tokens; the last one is the largest step.
        cut_ops: names such as "xllm::silu_and_mul" of ops that run between graphs, besides those tagged
            `torch.Tag.cudagraph_unsafe`.
        cut_collectives: collectives run between graphs too, whatever their names.

    Raises:
        ValueError: buckets that do not rise or exceed the backend's limit, or an op that does not exist.
    """

    name = "piecewise"

    def __init__(
        self,
        calls: ModelCalls,
        runtime: GraphRuntime,
        *,
        buckets: Sequence[int],
        cut_ops: Collection[str] = (),
        cut_collectives: bool = False,
    ) -> None:
        self.buckets = checked_buckets(buckets)
        backend = calls.backend
        limit = backend.limits.max_num_tokens
        if self.buckets[-1] > limit:
            raise ValueError(f"largest graph bucket {self.buckets[-1]} exceeds the backend's max_num_tokens {limit}")
        # Attributes of their own, since every step reads them.
        self._forward = calls.forward
        self._compute_logits = calls.compute_logits
        self._backend = backend
        self._runtime = runtime
        self._cut_ops = checked_ops(cut_ops)
        self._cut_collectives = cut_collectives
        self._inputs = TokenInputs(self.buckets[-1], backend.limits.device)
        self._chains: dict[int, _Chain] = {}
        self._bucket = 0  # of the last step
        self._log = CaptureLog(self.name, runtime)

    @property
    def num_captures(self) -> int:
        """Number of sizes that `warmup` captures."""
        return len(self.buckets)

    @property
    def reports(self) -> Sequence[CaptureReport]:
        """Time and memory of each capture, in capture order."""
        return tuple(self._log.reports)

    def refusal(self, phase: Phase, num_tokens: int) -> EagerReason | None:
        """Why this runner cannot serve a step; None if it can. Depends on nothing that differs between ranks."""
        if num_tokens > self.buckets[-1]:
            return EagerReason.OVER_TOKEN_BUDGET
        return None if self._chains else EagerReason.NOT_WARMED_UP

    # Captured tensors outlive the caller's grad and inference modes.
    @torch.inference_mode(False)
    @torch.no_grad()
    def warmup(self, on_capture: OnCapture | None = None) -> None:
        """Captures every bucket, largest first. Writes nothing to the cache. If it fails, no graph remains.

        Raises:
            RuntimeError: called twice; `CaptureError`: the model does something that a graph cannot hold.
        """
        with self._log.warmup(on_capture, self.release), self._runtime.session():
            for bucket in reversed(self.buckets):
                with self._log.measure(bucket, lambda: self._chains[bucket].num_graphs):  # noqa: B023 called at once
                    self._chains[bucket] = self._capture(bucket)

    @torch.no_grad()
    def execute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor | None,
    ) -> torch.Tensor:
        """Runs one step. Hidden states are in the graph's memory and valid until the next step.

        Raises:
            RuntimeError: no graph is captured.
            ValueError: more tokens than the largest bucket.
        """
        num_tokens = tokens.shape[0]
        bucket = bucket_for(self.buckets, num_tokens)
        if bucket is None:
            raise ValueError(f"{num_tokens} tokens exceed the largest graph bucket {self.buckets[-1]}")
        chain = self._chains.get(bucket)
        if chain is None:
            raise RuntimeError("execute was called before warmup: no graph is captured")
        if metadata.slot_mapping.shape[0] != num_tokens:
            raise ValueError(f"{num_tokens} tokens; the metadata has slots for {metadata.slot_mapping.shape[0]}")
        self._bucket = bucket
        self._inputs.fill(tokens, positions, bucket)
        self._backend.plan(metadata)
        with forward_context(self._backend):
            for call in chain.calls:
                call()
        if logits_indices is None:
            return chain.hidden[:num_tokens]
        return self._compute_logits(chain.hidden, logits_indices)

    def padded_outputs(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states of all rows of the last step, padding included; None, as no graph holds logits."""
        return self._chains[self._bucket].hidden, None

    @torch.no_grad()
    def run_padded_eagerly(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the last step again without its graphs, on the same padded inputs and plan. For checks."""
        with forward_context(self._backend):
            hidden = self._forward(*self._inputs.views(self._bucket))
            return hidden, self._compute_logits(hidden, None)

    def poison_inputs(self) -> None:
        """Overwrites every input buffer, so that a buffer that the next step does not fill shows. For checks."""
        self._inputs.poison()

    def release(self) -> None:
        """Drops the graphs. Call it before the runtime and any captured process group are released."""
        self._chains.clear()
        self._log.reports.clear()

    def _capture(self, bucket: int) -> _Chain:
        zeros = torch.zeros(bucket, dtype=torch.int32, device=self._backend.limits.device)
        self._inputs.fill(zeros, zeros, bucket)
        inputs = self._inputs.views(bucket)
        with forward_context(self._backend):
            for step in self._dummy_batches(bucket):
                self._backend.plan(step)
                self._compute_logits(self._forward(*inputs), zeros[: min(bucket, self._backend.limits.max_num_seqs)])
            self._backend.plan(empty_batch(self._backend))
            pieces = PieceCapture(self._runtime, self._cut_ops, cut_collectives=self._cut_collectives)
            with pieces.capture():
                hidden = self._forward(*inputs)
        return _Chain(calls=tuple(pieces.calls), num_graphs=pieces.num_graphs, hidden=self._runtime.borrow(hidden))

    def _dummy_batches(self, bucket: int) -> list[AttentionMetadata]:
        """Steps of each kind at this size, as large as possible, that compile attention's kernels."""
        backend = self._backend
        num_tokens = min(bucket, backend.limits.max_num_seqs * backend.limits.max_model_len)
        num_decodes = min(bucket, backend.limits.max_num_seqs)
        return [
            dummy_batch(backend, count, num_seqs, chunked=chunked)
            for count, num_seqs, chunked in (
                (num_tokens, 1, False),
                (num_tokens, 1, True),
                (num_decodes, num_decodes, False),
            )
        ]
