"""`CompiledRunner`: runs the model as one graph of torch.compile.

Owns the call of torch.compile, the passes and the count of compilations. What a graph becomes belongs to the compiler
that is named; attention and collectives stay the opaque ops they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xllm_attention import Phase, forward_context
from xllm_metadata import AttentionMetadata

from .dummy_batch import dummy_batch
from .inputs import TokenInputs
from .report import CaptureReport, OnCapture
from .runner import EagerReason, Forward, ModelCalls

GraphPass = Callable[[torch.fx.GraphModule], None]
"""Changes a graph of torch-level calls in place, before the compiler sees it; it is recompiled and linted after."""

_MIN_TOKENS = 2  # sizes 0 and 1 are constants to the compiler: such steps are padded


def compiler_names(*, debugging: bool = True) -> tuple[str, ...]:
    """Names of torch.compile backends in this environment, with or without those meant for debugging."""
    return tuple(torch.compiler.list_backends(exclude_tags=() if debugging else ("debug", "experimental")))


class CompiledRunner:
    """Runs steps of any kind and size through one compiled forward pass; the head runs eagerly on the selected rows.

    See `Runner.execute` for shapes.

    Args:
        calls: the model and its attention backend.
        compiler: one of `compiler_names()`.
        passes: applied in order to every graph.

    Raises:
        ValueError: an unknown compiler.
    """

    name = "compiled"
    num_captures = 1

    def __init__(
        self,
        calls: ModelCalls,
        *,
        compiler: str,
        passes: Sequence[GraphPass] = (),
    ) -> None:
        if compiler not in compiler_names():
            raise ValueError(
                f"no torch.compile backend {compiler!r}; available are {sorted(compiler_names(debugging=False))}"
            )
        self._compile = torch._dynamo.lookup_backend(compiler)
        self._passes = tuple(passes)
        # Attributes of their own, since every step reads them.
        self._forward = calls.forward
        self._compute_logits = calls.compute_logits
        self._backend = calls.backend
        self._inputs = TokenInputs(_MIN_TOKENS, calls.backend.limits.device)
        self._compiled: Forward | None = None  # after warm-up
        self.num_compilations = 0  # of the last warm-up
        self.reports: tuple[CaptureReport, ...] = ()

    def refusal(self, phase: Phase, num_tokens: int) -> EagerReason | None:
        """Why this runner cannot serve a step; None if it can."""
        return EagerReason.NOT_WARMED_UP if self._compiled is None else None

    def warmup(self, on_capture: OnCapture | None = None) -> None:
        """Compiles, and runs steps of several kinds and sizes, none of which may compile again later.

        Raises:
            RuntimeError: called twice.
        """
        if self._compiled is not None:
            raise RuntimeError("warmup of compiled was called before: the model is compiled once")
        start = time.perf_counter()
        backend = self._backend
        compiler = _Compiler(self._compile, self._passes)
        forward = torch.compile(
            self._forward, backend=compiler.compile, fullgraph=True, options={"guard_filter_fn": _keep_guards}
        )
        largest = min(backend.limits.max_num_tokens, backend.limits.max_model_len * backend.limits.max_num_seqs)
        # The first size must not be one that the compiler could take for a constant of the model.
        for num_tokens in dict.fromkeys((min(largest, 7), min(largest, _MIN_TOKENS), largest)):
            for chunked in (False, True):
                self._run_dummy_batch(forward, num_tokens, chunked=chunked)
        compiler.is_done = True
        self._compiled, self.num_compilations = forward, compiler.num_compilations
        report = CaptureReport(
            runner=self.name,
            size=largest,
            num_graphs=self.num_compilations,
            seconds=time.perf_counter() - start,
            memory_bytes=0,
        )
        self.reports = (report,)
        if on_capture is not None:
            on_capture(report)

    # torch.compile guards on both modes, so they must be the same in every thread.
    @torch.inference_mode(False)
    @torch.no_grad()
    def execute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor | None,
    ) -> torch.Tensor:
        """Runs one step.

        Raises:
            RuntimeError: not warmed up, or the step would compile again.
        """
        if self._compiled is None:
            raise RuntimeError("execute was called before warmup: nothing is compiled")
        num_tokens = tokens.shape[0]
        self._backend.plan(metadata)
        if num_tokens < _MIN_TOKENS:
            self._inputs.fill(tokens, positions, _MIN_TOKENS)
            tokens, positions = self._inputs.views(_MIN_TOKENS)
        tokens, positions = (ids.clone() if ids.is_inference() else ids for ids in (tokens, positions))
        with forward_context(self._backend):
            hidden = self._compiled(tokens, positions)
        if logits_indices is None:
            return hidden[:num_tokens]
        return self._compute_logits(hidden, logits_indices)

    def release(self) -> None:
        """Drops the compiled forward. The compiler's own caches refer to neither model nor KV caches."""
        self._compiled = None
        self.reports = ()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _run_dummy_batch(self, forward: Forward, num_tokens: int, *, chunked: bool) -> None:
        backend = self._backend
        step = dummy_batch(backend, num_tokens, 1, chunked=chunked)
        backend.plan(step)
        tokens = torch.zeros(max(num_tokens, _MIN_TOKENS), dtype=torch.int32, device=backend.limits.device)
        positions = torch.zeros_like(tokens)
        for tensor in (tokens, positions):
            torch._dynamo.mark_dynamic(tensor, 0)
        with forward_context(backend):
            hidden = forward(tokens, positions)
            self._compute_logits(hidden, tokens[:1])


class _Compiler:
    """The torch.compile backend. torch.compile keeps it until process exit, so it must not refer to the model."""

    def __init__(self, compile_graph: Callable[..., Callable[..., Any]], passes: Sequence[GraphPass]) -> None:
        self._compile = compile_graph
        self._passes = passes
        self.num_compilations = 0
        self.is_done = False  # after warm-up: a later compilation would happen inside a step

    def compile(self, module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles the graph `module` into a callable."""
        if self.is_done:
            raise RuntimeError("the model would be compiled again after warm-up")
        self.num_compilations += 1
        for change in self._passes:
            change(module)
            module.graph.lint()
            module.recompile()
        compiled: Callable[..., Any] = self._compile(module, list(example_inputs))
        return compiled


def _keep_guards(guards: Sequence[Any]) -> list[bool]:
    """Which conditions are checked before the compiled code is used again.

    Drops guards on the calling thread's state, such as its number of CPU threads, which have no name: the runner sets
    the relevant part of that state. Keeps all guards on tensors, shapes and the model.
    """
    return [bool(guard.name) or guard.guard_type == "SHAPE_ENV" for guard in guards]
