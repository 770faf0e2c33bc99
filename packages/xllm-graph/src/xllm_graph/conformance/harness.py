"""`ReplayHarness`: requests over two KV caches, one for graph execution and one for the eager reference.

Owns pages, token ids, the poison and the checks of a step. Runs each step twice; compares outputs, caches and padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from xllm_attention import Phase
from xllm_metadata import (
    FIELDS,
    AttentionMetadata,
    BuiltAttentionMetadata,
    CacheKind,
    LayerCache,
    StaticAttentionMetadata,
    build_attention_metadata,
    validate,
)

from ..decode import DecodeGraphRunner
from ..piecewise import PiecewiseGraphRunner
from ..runner_set import RunnerSet
from .comparison import Check, ConformanceError, as_bytes, check_bits, check_close, check_greedy

Execute = Callable[[torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor | None], torch.Tensor]
"""(tokens, positions, metadata, logits_indices) -> logits or hidden states, as `Runner.execute`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes that both executors of a harness serve."""

    max_num_seqs: int
    max_num_tokens: int  # the largest bucket of tokens
    max_model_len: int
    page_size: int
    num_pages: int
    vocab_size: int
    num_slots: int = 64  # of states, in a model that has them


@dataclass(slots=True)
class _Request:
    tokens: torch.Tensor  # [max_model_len] int32, host: prompt and answer, drawn in advance
    length: int = 0  # tokens in the cache
    pages: list[int] = field(default_factory=list)
    slot: int = -1  # of its state, in a model with states


class ReplayHarness:
    """Requests, by number, whose steps run under graphs and eagerly.

    Args:
        execute: the executor under test; its backend is bound to `caches`.
        runners: the runners that `execute` uses.
        caches: one per layer, of the executor under test.
        reference: eager execution over other caches.
        reference_caches: one per layer, of the reference.
        limits: of both.
        device: of tokens and caches.
        seed: of all token ids and pages.
    """

    def __init__(
        self,
        execute: Execute,
        runners: RunnerSet,
        caches: Sequence[LayerCache],
        reference: Execute,
        reference_caches: Sequence[LayerCache],
        *,
        limits: Limits,
        device: torch.device | str,
        seed: int = 0,
    ) -> None:
        self.limits = limits
        self.runners = runners
        self.device = torch.device(device)
        self.random = torch.Generator().manual_seed(seed)
        self._execute, self._reference = execute, reference
        paged, state = CacheKind.PAGED, CacheKind.STATE
        self._caches = [tensor for cache in caches for tensor in cache.of_kind(paged)]
        self._reference_caches = [tensor for cache in reference_caches for tensor in cache.of_kind(paged)]
        self._states = [tensor for cache in caches for tensor in cache.of_kind(state)]
        self._reference_states = [tensor for cache in reference_caches for tensor in cache.of_kind(state)]
        for tensor in (*self._caches, *self._reference_caches, *self._states, *self._reference_states):
            tensor.fill_(float("nan"))
        # A state carries the rounding of all earlier steps, and a norm of small keys makes it larger.
        self._factor = 10.0 if self._states else 1.0
        num_slots = self._states[0].shape[0] if self._states else 0
        self._free_slots = torch.randperm(num_slots, generator=self.random).tolist()
        self._free = torch.randperm(limits.num_pages, generator=self.random).tolist()
        self._uses: Counter[int] = Counter()  # by page: requests that read it
        self._requests: dict[int, _Request] = {}
        self._next = 0

    def add(self, *, like: int | None = None, shared_pages: int = 0) -> int:
        """A new request; the first pages may be those of the request `like` (a prefix hit).

        A model with states has no prefix hits: pages hold keys and values, not the state after them.
        """
        text = torch.randint(
            0, self.limits.vocab_size, (self.limits.max_model_len,), dtype=torch.int32, generator=self.random
        )
        request = _Request(tokens=text)
        if self._states:
            request.slot = self._free_slots.pop()
        if like is not None and shared_pages and self._states:
            request.tokens = self._requests[like].tokens.clone()
        elif like is not None and shared_pages:
            other = self._requests[like]
            request.length = shared_pages * self.limits.page_size
            if request.length > other.length:
                raise ValueError(f"request {like} has no {shared_pages} full pages to share")
            request.tokens[: request.length] = other.tokens[: request.length]
            request.pages = other.pages[:shared_pages]
            self._uses.update(request.pages)
        number, self._next = self._next, self._next + 1
        self._requests[number] = request
        return number

    def copy(self, number: int) -> int:
        """A new request with the same tokens, none of them in the cache yet."""
        copy = self.add()
        self._requests[copy].tokens = self._requests[number].tokens.clone()
        return copy

    def length(self, number: int) -> int:
        """Tokens of the request in the cache."""
        return self._requests[number].length

    def drop(self, number: int) -> None:
        """Ends a request; the pages that no other one shares are poisoned."""
        request = self._requests.pop(number)
        pages = request.pages
        self._uses.subtract(pages)
        unused = [page for page in pages if not self._uses[page]]
        for tensor in (*self._caches, *self._reference_caches):
            tensor[unused] = float("nan")
        self._free += unused
        if request.slot >= 0:
            self._free_slots.append(request.slot)
            for tensor in (*self._states, *self._reference_states):
                tensor[request.slot] = float("nan")

    def clear(self) -> None:
        """Ends every request."""
        for number in list(self._requests):
            self.drop(number)

    def step(self, *parts: tuple[int, int], logits: Sequence[int] | None = None) -> torch.Tensor:
        """Runs one step of (request, number of its next tokens) and checks everything.

        Args:
            logits: rows whose logits are wanted; by default the last row of every part with tokens.

        Returns:
            The reference's logits.

        Raises:
            ConformanceError: what differs.
        """
        metadata, tokens, positions = self._build(parts)
        indices = self._indices(parts) if logits is None else list(logits)
        rows = torch.tensor(indices, dtype=torch.int64).to(self.device)
        dispatch = self.runners.dispatch(Phase.of(metadata), tokens.shape[0])
        runner = dispatch.runner
        if isinstance(runner, DecodeGraphRunner | PiecewiseGraphRunner):
            runner.poison_inputs()
        before = [as_bytes(tensor).clone() for tensor in self._caches]
        states = [tensor.clone() for tensor in self._states]
        expected = self._reference(tokens, positions, metadata, rows)
        actual = self._run(tokens, positions, metadata, rows)
        error = check_close(Check.LOGITS, "logits", actual, expected, self._factor)
        check_greedy(actual, expected, error)
        self._check_caches(metadata, before)
        self._check_states(parts, states)
        if isinstance(runner, DecodeGraphRunner | PiecewiseGraphRunner):
            written = [tensor.clone() for tensor in self._states]
            _copy_all(self._states, states)  # `_check_padded` runs the step again, and it must start from the same
            self._check_padded(runner)
            _copy_all(self._states, written)
        return expected

    def step_hidden(self, *parts: tuple[int, int]) -> None:
        """Runs one step that asks for hidden states, and checks those."""
        metadata, tokens, positions = self._build(parts)
        expected = self._reference(tokens, positions, metadata, None)
        actual = self._run(tokens, positions, metadata, None)
        check_close(Check.HIDDEN_STATES, "hidden states", actual, expected, self._factor)

    def _run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor | None,
    ) -> torch.Tensor:
        """Runs a step that the reference has served. Errors of any other type are bugs, and are not caught."""
        try:
            return self._execute(tokens, positions, metadata, logits_indices)
        except (IndexError, RuntimeError, ValueError) as error:
            raise ConformanceError(Check.STEP_RAISED, f"the step raised {type(error).__name__}: {error}") from error

    def _build(self, parts: Sequence[tuple[int, int]]) -> tuple[AttentionMetadata, torch.Tensor, torch.Tensor]:
        page_size = self.limits.page_size
        tokens: list[torch.Tensor] = []
        positions: list[torch.Tensor] = []
        for number, count in parts:
            request = self._requests[number]
            end = request.length + count
            if end > self.limits.max_model_len:
                raise ValueError(f"request {number} would reach {end} tokens of {self.limits.max_model_len}")
            while len(request.pages) * page_size < end:
                page = self._free.pop()
                request.pages.append(page)
                self._uses[page] += 1
            tokens.append(request.tokens[request.length : end])
            positions.append(torch.arange(request.length, end, dtype=torch.int32))
            request.length = end
        requests = [self._requests[number] for number, _ in parts]
        metadata = build_attention_metadata(
            [count for _, count in parts],
            [request.length for request in requests],
            [request.pages for request in requests],
            page_size,
            self.device,
            state_slots=[request.slot for request in requests] if self._states else None,
        )
        nothing = torch.zeros(0, dtype=torch.int32)
        return (
            metadata,
            torch.cat([nothing, *tokens]).to(self.device),
            torch.cat([nothing, *positions]).to(self.device),
        )

    @staticmethod
    def _indices(parts: Sequence[tuple[int, int]]) -> list[int]:
        ends = torch.tensor([count for _, count in parts]).cumsum(0).tolist() if parts else []
        return [end - 1 for end, (_, count) in zip(ends, parts, strict=True) if count]

    def _check_caches(self, metadata: AttentionMetadata, before: Sequence[torch.Tensor]) -> None:
        slots = metadata.slot_mapping.long()
        pages, offsets = slots // self.limits.page_size, slots % self.limits.page_size
        for layer, (actual, expected, old) in enumerate(zip(self._caches, self._reference_caches, before, strict=True)):
            name = f"written slots of cache {layer}"
            check_close(Check.CACHE_CONTENTS, name, actual[pages, offsets], expected[pages, offsets], self._factor)
            now = as_bytes(actual).clone()
            now[pages, offsets] = old[pages, offsets]
            if not torch.equal(now, old):
                raise ConformanceError(Check.CACHE_UNTOUCHED, f"cache {layer} changed outside of the step's slots")

    def _check_states(self, parts: Sequence[tuple[int, int]], before: Sequence[torch.Tensor]) -> None:
        slots = [self._requests[number].slot for number, _ in parts]
        computed = [self._requests[number].slot for number, count in parts if count]
        for index, (actual, expected, old) in enumerate(zip(self._states, self._reference_states, before, strict=True)):
            name = f"written slots of state {index}"
            check_close(Check.CACHE_CONTENTS, name, actual[computed], expected[computed], self._factor)
            others = [slot for slot in range(actual.shape[0]) if slot not in slots]
            if not torch.equal(as_bytes(actual[others]), as_bytes(old[others])):
                raise ConformanceError(Check.CACHE_UNTOUCHED, f"state {index} changed outside of the step's slots")

    def _check_padded(self, runner: DecodeGraphRunner | PiecewiseGraphRunner) -> None:
        if isinstance(runner, DecodeGraphRunner):
            size = runner.metadata.slot_mapping.shape[0]
            try:
                validate(
                    _live(runner.metadata),
                    num_tokens=size,
                    num_seqs=size,
                    num_pages=self.limits.num_pages,
                    page_size=self.limits.page_size,
                )
            except ValueError as error:
                raise ConformanceError(
                    Check.PADDED_CONTRACT, f"the padded metadata breaks the contract: {error}"
                ) from error
        outputs = runner.padded_outputs()
        names = ("hidden states", "logits")
        # Copied before the next use of the pool, which owns them.
        graph = [(name, out.clone()) for name, out in zip(names, outputs, strict=True) if out is not None]
        for (name, actual), expected in zip(graph, runner.run_padded_eagerly(), strict=False):
            if not bool(torch.isfinite(actual).all()):
                raise ConformanceError(Check.PADDED_FINITE, f"{name}: NaN or infinity in a padding row")
            check_bits(name, actual, expected)


def _copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _live(metadata: StaticAttentionMetadata) -> AttentionMetadata:
    """The padded step, with the page indices cut to those that it uses; the buffer is longer."""
    fields = {field.name: getattr(metadata, field.name) for field in FIELDS}
    fields["paged_kv_indices"] = fields["paged_kv_indices"][: int(metadata.paged_kv_indptr_host[-1])]
    fields["max_query_len"] = 1  # scalars are not padded: 0 in a step without a sequence, whose padded rows have 1
    return BuiltAttentionMetadata(**fields)
