"""`ModelExecutor`: runs the steps of one model with one attention backend, by one `execute` call per step.

Owns the backend, the runners and their lifetime. It does not schedule or allocate KV memory, and recomputes nothing
that the host has built.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence

import torch
from tqdm import tqdm

from xllm_attention import AttentionBackend, BackendLimits, create_backend
from xllm_graph import CaptureReport, GraphPass, RunnerSet
from xllm_metadata import (
    AttentionMetadata,
    CacheKind,
    LayerCache,
    StaticAttentionMetadata,
    build_attention_metadata,
    check_present,
    validate,
)
from xllm_models import CausalLM
from xllm_models.ops import group_stats

from .config import ExecutorConfig
from .runners import Sizes, make_runners
from .token_ids import check_token_ids, reading_waits

_LOGGER = logging.getLogger(__name__)
_LOG_INTERVAL = 2.0  # seconds between two lines about the warm-up's progress


class ModelExecutor:
    """Executes the steps of one model.

    Call `bind_kv_caches` once, `warmup` once, then `execute` for every step; `shutdown` at the end. It is not
    thread-safe. Steps share buffers. So all of them run on one stream, or each step's stream waits for the stream of
    the previous step.

    Args:
        model: its weights may be loaded later, but before the first `warmup` or `execute`.
        config: an `ExecutorConfig`, or a mapping of its fields.
        max_seqs_per_batch: largest number of sequences in a step.
        graph_passes: applied to the graphs of a torch.compile backend, before the compiler.

    Raises:
        ValueError: a config value or a limit that is out of range or not supported.
    """

    def __init__(
        self,
        model: CausalLM,
        config: ExecutorConfig | Mapping[str, object],
        max_seqs_per_batch: int,
        *,
        graph_passes: Sequence[GraphPass] = (),
    ) -> None:
        if not isinstance(config, ExecutorConfig):
            config = ExecutorConfig.from_mapping(config)
        self.config = config
        num_positions = model.config.num_positions
        if config.max_model_len > num_positions:
            raise ValueError(f"max_model_len {config.max_model_len} exceeds the model's {num_positions} positions")
        # Some rope types allow more than max_position_embeddings; the option must ask for that explicitly.
        default = model.config.max_model_len or model.config.max_position_embeddings
        self._max_model_len = config.max_model_len or min(default, num_positions)
        if max_seqs_per_batch < 1:
            raise ValueError(f"max_seqs_per_batch is {max_seqs_per_batch}; it must be at least 1")
        self._device = model.device
        self._max_num_seqs = max_seqs_per_batch
        self._sizes = Sizes.of(config, max_seqs_per_batch, self._max_model_len, model.device)
        self._backend = create_backend(
            config.attention_backend,
            model.layer_specs,
            BackendLimits(
                device=model.device,
                dtype=model.dtype,
                max_num_seqs=self._sizes.max_num_seqs,
                max_num_tokens=self._sizes.max_num_tokens,
                max_model_len=self._max_model_len,
                kv_groups=config.kv_groups,
            ),
        )
        self._model: CausalLM | None = model
        self._graph_passes = graph_passes
        self._runners: RunnerSet | None = None  # made when the caches are bound
        self._ready_runners: RunnerSet | None = None  # the same, after the first use has found the weights loaded
        self._last_stats: dict[str, object] | None = None  # taken at shutdown
        self._validate = config.validate or os.environ.get("XLLM_VALIDATE") == "1"
        self._vocab_size = model.config.vocab_size
        self._checks_token_ids = self._validate or not reading_waits(model.device)
        self._num_pages: list[int] | None = None  # by KV cache group
        self._num_slots: int | None = None  # None: no layer keeps a state
        self._warmup_plans = self._backend.plan_counts

    def bind_kv_caches(self, caches: Sequence[LayerCache | Sequence[torch.Tensor | None]]) -> None:
        """Binds the KV cache, once. The host owns the memory, which must outlive the executor.

        Args:
            caches: one entry per layer: a `LayerCache`, or the tensors that `CausalLM.cache_specs` lists for the
                layer, in its order, on the model's device.

        Raises:
            RuntimeError: a cache is bound already.
            ValueError: wrong number of layers, shape, dtype or device, or a graph runtime that does not support it.
        """
        model = self._live()
        if self._num_pages is not None:
            raise RuntimeError("bind_kv_caches was called before: an executor is bound once")
        specs = model.cache_specs
        if len(caches) != len(specs):
            raise ValueError(f"{len(caches)} caches for {len(specs)} layers; every layer needs one")
        layers = [LayerCache.from_tensors(tensors, of) for tensors, of in zip(caches, specs, strict=True)]
        self._backend.bind_kv_caches(layers)
        first = next(layer.k for layer in layers if layer.k is not None)
        self._runners = make_runners(model, self.config, self._backend, self._sizes, self._graph_passes)
        self._device = first.device  # with its index, as every step's tensors have it
        # A group without layers has any number of pages: as many as int32 slots can address.
        self._num_pages = [2**31 // self._backend.page_size] * (self._backend.num_group_tables + 1)
        for layer, group in zip(layers, self._backend.kv_group_of_layer, strict=True):
            for tensor in layer.of_kind(CacheKind.PAGED):
                self._num_pages[group] = tensor.shape[0]
        states = [tensor for layer in layers for tensor in layer.of_kind(CacheKind.STATE)]
        self._num_slots = states[0].shape[0] if states else None

    def warmup(self) -> None:
        """Compiles kernels and captures the configured graphs, so that the first request does not wait for them.

        Without graphs it compiles a decode step's kernels only; those of prompts and other sizes compile at first use.
        It writes nothing to the cache, and counts neither as steps nor in the plan counts of `stats`. A warm-up that
        fails leaves no graph: steps run eagerly then, and it may be tried again.

        Raises:
            RuntimeError: no cache is bound, the model has no loaded weights, graphs are captured already, or a capture
                failed (`CaptureError` says why).
        """
        runners = self._ready_runners or self._first_use("warmup")
        counted = self._num_plans()
        try:
            self._warm_up(runners)
        finally:
            now = self._backend.plan_counts
            self._warmup_plans = tuple(count - before for count, before in zip(now, counted, strict=True))

    def execute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs one step of T tokens. Returns logits of n rows, or hidden states.

        Inputs must be ready on the current stream and stay unmodified until that stream has passed the step. The result
        is ordered on the same stream.

        Args:
            tokens: [T] int32, on the model's device. Each id must be in the vocabulary. This is checked on the CPU, and
                on other devices with `validate`. Without the check, the logits that depend on such an id are NaN.
            positions: [T] int32, on the model's device.
            metadata: of the step; a view that C++ passes is readable only during this call.
            logits_indices: [n] int32 or int64, on the model's device: the rows to compute logits of. None returns
                hidden states.
            inputs_embeds: not supported by this version; must be None.

        Returns:
            logits [n, vocab] in the model's dtype, or hidden states [T, hidden]; valid until the next `execute`.

        Raises:
            RuntimeError: no cache is bound, the model has no loaded weights, the executor was shut down, or
                `eager_is_error` forbids the step.
            ValueError: a wrong shape, dtype or device, a token id outside the vocabulary, an absent field, metadata for
                another number of tokens, page tables that do not fit the KV lengths, or a step beyond the limits. The
                executor stays usable.
        """
        runners = self._ready_runners or self._first_use("execute")
        if inputs_embeds is not None:
            raise ValueError("inputs_embeds is not supported by this version; pass token ids")
        self._check_inputs(tokens, positions, logits_indices)
        try:
            if self._validate:
                assert self._num_pages is not None  # the caches are bound
                validate(
                    metadata,
                    num_tokens=tokens.shape[0],
                    num_seqs=metadata.paged_kv_last_page_len_host.shape[0],
                    num_pages=self._num_pages[0],
                    group_num_pages=self._num_pages[1:] or None,
                    num_slots=self._num_slots,
                    page_size=self._backend.page_size,
                    positions=positions,
                    logits_indices=logits_indices,
                )
            self._check_limits(tokens, metadata)
            if self._checks_token_ids:
                check_token_ids(tokens, self._vocab_size)
            return runners.execute(tokens, positions, metadata, logits_indices)
        except (AttributeError, TypeError):
            check_present(metadata)  # names an absent field; a check before every step would cost host time
            raise

    @property
    def runners(self) -> RunnerSet:
        """The runners that execute the steps.

        Raises:
            RuntimeError: no cache is bound, the model has no loaded weights, or the executor was shut down.
        """
        return self._ready_runners or self._first_use("runners")

    def stats(self) -> dict[str, object]:
        """Counts since the start, as plain values.

        `steps`: by runner. `eager_reasons`: eager steps by reason. `graph_misses`: per preferred runner, the steps that
        another runner's graph served instead, by reason. `plans`: by attention group. `graphs`: time and memory of each
        capture. `graph_memory_bytes`: of their pool. `groups`: the process groups, with their all-reduce transport.
        """
        runners = self._runners
        if self._last_stats is not None:
            return self._last_stats
        return {
            "steps": {} if runners is None else dict(runners.stats.steps),
            "eager_reasons": {} if runners is None else dict(runners.stats.eager_reasons),
            "graph_misses": {} if runners is None else {k: dict(v) for k, v in runners.stats.misses.items()},
            "plans": self._num_plans(),
            "graphs": [] if runners is None else [report.as_dict() for report in runners.reports],
            "graph_memory_bytes": 0 if runners is None else runners.memory_bytes,
            "groups": group_stats(),
        }

    def shutdown(self) -> None:
        """Drops the graphs, then the model: a process group that the graphs captured must outlive them.

        Every later call except `shutdown` and `stats` raises `RuntimeError`.
        """
        if self._model is None:
            return
        self._last_stats = self.stats()
        if self._runners is not None:
            self._runners.release()
        self._model = self._runners = self._ready_runners = None

    def _live(self) -> CausalLM:
        if self._model is None:
            raise RuntimeError("the executor was shut down")
        return self._model

    def _first_use(self, call: str) -> RunnerSet:
        """The runners, after the checks that need not be repeated for every step."""
        model = self._live()
        if self._runners is None:
            raise RuntimeError(f"{call} was called before bind_kv_caches")
        model.check_weights_loaded()
        self._ready_runners = self._runners
        return self._runners

    def _warm_up(self, runners: RunnerSet) -> None:
        zero = torch.zeros(1, dtype=torch.int32, device=self._device)
        runners.eager.execute(zero, zero, _padding_step(self._backend), zero)
        total = runners.num_captures
        shows_bar = self.config.progress and sys.stderr is not None and sys.stderr.isatty()
        bar = tqdm(total=total, desc="capturing graphs", file=sys.stderr, disable=not (total and shows_bar))
        logged = time.monotonic()
        num_done = 0

        def on_capture(report: CaptureReport) -> None:
            nonlocal logged, num_done
            num_done += 1
            _advance(bar, f"{report.runner} {report.size}")
            if not shows_bar and (num_done == total or time.monotonic() - logged >= _LOG_INTERVAL):
                logged = time.monotonic()
                last = f"last {report.runner} {report.size}"
                self._report(f"warm-up: {num_done} of {total} graphs captured, {last}")

        with bar:
            runners.warmup(on_capture)

    def _report(self, line: str) -> None:
        if not self.config.progress:
            _LOGGER.info("%s", line)
        elif sys.stderr is not None:  # None: closed at the start of the process
            # A full stderr that does not block must not fail the warm-up.
            with contextlib.suppress(OSError):
                sys.stderr.write(line + "\n")
                sys.stderr.flush()

    def _num_plans(self) -> list[int]:
        """Plans of steps by attention group, without those of the warm-up."""
        return [count - warm for count, warm in zip(self._backend.plan_counts, self._warmup_plans, strict=True)]

    def _check_inputs(self, tokens: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor | None) -> None:
        if tokens.dim() != 1 or tokens.dtype is not torch.int32:
            raise ValueError(f"tokens is {_describe(tokens)}; it must be [T] int32")
        if positions.dim() == 2:
            raise ValueError(
                f"positions is {_describe(positions)}; multi-axis positions are not supported by this version, "
                "it must be [T] int32"
            )
        if positions.shape != tokens.shape or positions.dtype is not torch.int32:
            raise ValueError(f"positions is {_describe(positions)}; it must be [{tokens.shape[0]}] int32, as tokens")
        if logits_indices is not None and (
            logits_indices.dim() != 1 or logits_indices.dtype not in (torch.int32, torch.int64)
        ):
            raise ValueError(f"logits_indices is {_describe(logits_indices)}; it must be [n] int32 or int64")
        device = self._device
        if tokens.device != device or positions.device != device:
            name, tensor = ("positions", positions) if tokens.device == device else ("tokens", tokens)
            raise ValueError(f"{name} is on device {tensor.device}; it must be on {device}")
        if logits_indices is not None and logits_indices.device != device:
            raise ValueError(f"logits_indices is on device {logits_indices.device}; it must be on {device}")

    def _check_limits(self, tokens: torch.Tensor, metadata: AttentionMetadata) -> None:
        # The backend's limits are larger, to make room for padding.
        num_seqs = metadata.paged_kv_last_page_len_host.shape[0]
        if num_seqs > self._max_num_seqs:
            raise ValueError(f"number of sequences {num_seqs} exceeds max_seqs_per_batch {self._max_num_seqs}")
        num_tokens, limit = tokens.shape[0], self.config.max_tokens_per_batch
        num_slots = metadata.slot_mapping.shape[0]
        if num_slots != num_tokens:
            raise ValueError(
                f"metadata.slot_mapping has {num_slots} entries and tokens {num_tokens}; they must be equal"
            )
        if num_tokens > limit:
            raise ValueError(f"number of tokens {num_tokens} exceeds max_tokens_per_batch {limit}")


def _describe(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _advance(bar: tqdm[object], what: str) -> None:
    bar.set_postfix_str(what, refresh=False)
    bar.update()


def _padding_step(backend: AttentionBackend) -> AttentionMetadata:
    """A decode step of one padding row: it writes nothing to the cache, and its attention output is 0."""
    step = StaticAttentionMetadata(
        max_num_tokens=1,
        max_num_seqs=1,
        max_num_pages=1,
        device=backend.limits.device,
        optional=backend.optional_fields,
        num_group_tables=max(1, backend.num_group_tables),
    )
    empty = build_attention_metadata(
        [],
        [],
        [],
        page_size=1,
        device=backend.limits.device,
        state_slots=[] if backend.runs_state_layers else None,
        group_page_tables=[[]] * backend.num_group_tables,
    )
    step.fill(empty, num_tokens=1, num_seqs=1)
    return step
