"""`DecodeGraphRunner`: replays one full graph per decode step, padded to a bucket of sequences.

Owns the persistent inputs and metadata, the graphs and their outputs. The backend plans, the runtime captures.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from xllm_attention import Phase, forward_context
from xllm_metadata import FIELDS, AttentionMetadata, StaticAttentionMetadata

from .buckets import bucket_for, checked_buckets
from .dummy_batch import dummy_batch, empty_batch
from .inputs import POISON, TokenInputs
from .report import CaptureLog, CaptureReport, OnCapture
from .runner import EagerReason, ModelCalls
from .runtime import Graph, GraphRuntime


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """One bucket's graph and its output tensors, whose memory the pool's other graphs overwrite."""

    graph: Graph
    hidden: torch.Tensor  # [bucket, hidden]
    logits: torch.Tensor | None  # [bucket, vocab]; those of logits_indices come first
    plan_layout: Hashable  # of the plan that was captured
    plans_on_host: bool  # whether host mirrors must be filled before the plan


class DecodeGraphRunner:
    """Runs decode steps (one token per sequence) by replaying a graph of the whole model, head included.

    A step is copied into static buffers, padded to a bucket with empty sequences, planned, and replayed. The graph
    selects the rows of `logits_indices` before the head. Its outputs are valid until the next step. Shapes are those of
    `Runner.execute`.

    Args:
        calls: the model and its attention backend, whose limits must hold the largest bucket.
        runtime: captures and replays the graphs.
        buckets: rising numbers of sequences; the last is the largest step that it serves.
        logits_in_graph: whether the head is captured; else it runs after the replay, on the selected rows.

    Raises:
        ValueError: buckets that do not rise or exceed the backend's limits, or a backend that can't capture decode.
    """

    name = "decode_graph"

    def __init__(
        self,
        calls: ModelCalls,
        runtime: GraphRuntime,
        *,
        buckets: Sequence[int],
        logits_in_graph: bool = True,
    ) -> None:
        self.buckets = checked_buckets(buckets)
        backend = calls.backend
        largest = self.buckets[-1]
        if Phase.DECODE not in backend.capabilities.full_graph_phases:
            raise ValueError(f"attention backend {backend.name!r} cannot run decode in a full graph")
        for name, limit in (
            ("max_num_seqs", backend.limits.max_num_seqs),
            ("max_num_tokens", backend.limits.max_num_tokens),
        ):
            if largest > limit:
                raise ValueError(f"largest graph bucket {largest} exceeds the backend's {name} {limit}")
        # Attributes of their own, since every step reads them.
        self._forward = calls.forward
        self._compute_logits = calls.compute_logits
        self._backend = backend
        self._runtime = runtime
        self._logits_in_graph = logits_in_graph
        self._inputs = TokenInputs(largest, backend.limits.device)
        # One page-index buffer for all buckets, long enough for the longest sequences in every row.
        self._metadata = StaticAttentionMetadata(
            max_num_tokens=largest,
            max_num_seqs=largest,
            max_num_pages=largest * -(-backend.limits.max_model_len // backend.page_size),
            device=backend.limits.device,
            optional=backend.optional_fields,
            num_group_tables=max(1, backend.num_group_tables),
        )
        self._captured: dict[int, _Captured] = {}
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

    @property
    def metadata(self) -> StaticAttentionMetadata:
        """The metadata of the last step, padding included."""
        return self._metadata

    def refusal(self, phase: Phase, num_tokens: int) -> EagerReason | None:
        """Why this runner cannot serve a step; None if it can. Depends on nothing that differs between ranks."""
        if phase is not Phase.DECODE:
            return EagerReason.NOT_DECODE
        if num_tokens > self.buckets[-1]:
            return EagerReason.OVER_GRAPH_BUCKETS
        return None if self._captured else EagerReason.NOT_WARMED_UP

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
                with self._log.measure(bucket, lambda: 1):
                    self._captured[bucket] = self._capture(bucket)

    # Only the head outside of the graph could record gradients; replays never do.
    def execute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor | None,
    ) -> torch.Tensor:
        """Runs one decode step. The result is in the graph's memory and valid until the next step.

        Raises:
            RuntimeError: no graph is captured, or the backend planned the step in another layout than the captured one.
            ValueError: more sequences than the largest bucket, metadata of another step, or a step that
                `AttentionBackend.check_step` refuses.
        """
        num_tokens = tokens.shape[0]
        bucket = bucket_for(self.buckets, num_tokens)
        if bucket is None:
            raise ValueError(f"batch size {num_tokens} exceeds the largest graph bucket {self.buckets[-1]}")
        captured = self._captured.get(bucket)
        if captured is None:
            raise RuntimeError("execute was called before warmup: no graph is captured")
        if metadata.slot_mapping.shape[0] != num_tokens:
            raise ValueError(f"{num_tokens} tokens; the metadata has slots for {metadata.slot_mapping.shape[0]}")
        num_seqs = metadata.kv_seq_lens_host.shape[0] - 1
        if num_seqs != num_tokens:  # checked before padding makes them equal
            raise ValueError(f"a decode step has one token per sequence: {num_tokens} tokens, {num_seqs} sequences")
        self._backend.check_step(metadata)
        captured_indices = logits_indices
        if logits_indices is not None and (captured.logits is None or logits_indices.shape[0] > bucket):
            captured_indices = None  # the head runs after the graph
        self._fill(tokens, positions, metadata, bucket, captured_indices, host=captured.plans_on_host)
        self._backend.plan(self._metadata, graph=True)
        if self._backend.plan_layout != captured.plan_layout:
            raise RuntimeError(
                f"attention backend {self._backend.name!r} planned bucket {bucket} as {self._backend.plan_layout!r}; "
                f"its graph was captured as {captured.plan_layout!r}"
            )
        captured.graph.replay()
        self._metadata.fill_host()  # overlaps with the replay, unless the plan needed the host mirrors
        if logits_indices is None:
            return captured.hidden[:num_tokens]
        if captured.logits is None or captured_indices is None:
            with torch.no_grad():
                return self._compute_logits(captured.hidden, logits_indices)
        return captured.logits[: captured_indices.shape[0]]

    def padded_outputs(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states and logits of the last step, padding included; logits are None if they are not in the graph."""
        captured = self._captured[self._bucket]
        return captured.hidden, captured.logits

    @torch.no_grad()
    def run_padded_eagerly(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the last step again without its graph, on the same padded inputs and plan. For checks."""
        with forward_context(self._backend):
            hidden = self._forward(*self._inputs.views(self._bucket))
            return hidden, self._logits(hidden, self._bucket)

    def poison_inputs(self) -> None:
        """Overwrites every input buffer, so that a buffer that the next step does not fill shows. For checks."""
        self._inputs.poison()
        for field in FIELDS:
            if isinstance(getattr(self._metadata, field.name), torch.Tensor):
                self._metadata.buffer(field.name).fill_(POISON)

    def release(self) -> None:
        """Drops the graphs. Call it before the runtime and any captured process group are released."""
        self._captured.clear()
        self._log.reports.clear()

    def _capture(self, bucket: int) -> _Captured:
        backend = self._backend
        zeros = torch.zeros(bucket, dtype=torch.int32, device=backend.limits.device)
        decode = dummy_batch(backend, bucket, bucket, chunked=False)
        # Warm up with live rows, then with padding rows as in the capture: a kernel may have a variant for each.
        for ids, step in ((zeros, decode), (zeros[:0], empty_batch(backend))):
            self._fill(ids, ids, step, bucket)
            backend.plan(self._metadata, graph=True)
            self._run(bucket)
        self._runtime.begin()
        hidden, logits = self._run(bucket)
        graph = self._runtime.end()
        return _Captured(
            graph=graph,
            hidden=self._runtime.borrow(hidden),
            logits=None if logits is None else self._runtime.borrow(logits),
            plan_layout=backend.plan_layout,
            plans_on_host=backend.plans_on_host(Phase.DECODE),
        )

    def _run(self, bucket: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        with forward_context(self._backend):
            hidden = self._forward(*self._inputs.views(bucket))
            return hidden, self._logits(hidden, bucket) if self._logits_in_graph else None

    def _logits(self, hidden: torch.Tensor, bucket: int) -> torch.Tensor:
        return self._compute_logits(hidden.index_select(0, self._inputs.logits_indices[:bucket]), None)

    def _fill(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        bucket: int,
        logits_indices: torch.Tensor | None = None,
        *,
        host: bool = True,
    ) -> None:
        self._bucket = bucket
        if logits_indices is None:
            # Filled with 0: the indices of an earlier step may exceed this bucket.
            logits_indices = self._inputs.no_indices
        elif logits_indices.dtype is not torch.int32:
            logits_indices = logits_indices.to(torch.int32)
        copies = self._inputs.copies(tokens, positions, bucket, logits_indices)
        self._metadata.fill(metadata, num_tokens=bucket, num_seqs=bucket, extra_copies=copies, host=host)
