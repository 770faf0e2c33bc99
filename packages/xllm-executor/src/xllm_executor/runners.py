"""Builds an executor's runners, graph buckets and buffer capacities from its options.

The runners, and the choice between them in a step, belong to `xllm_graph`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from xllm_attention import AttentionBackend, Phase
from xllm_graph import (
    CapturingRunner,
    CompiledRunner,
    DecodeGraphRunner,
    EagerReason,
    EagerRunner,
    GraphPass,
    ModelCalls,
    PiecewiseGraphRunner,
    RunnerSet,
    create_runtime,
    parse_buckets,
    sequence_buckets,
    token_buckets,
)
from xllm_models import CausalLM

from .config import ExecutorConfig

_MAX_KEYS_OF_CPU_GRAPH = 32_768  # of a decode graph by default: sequences * max_model_len


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The graph buckets, and the capacity that the attention backend needs for a padded step."""

    decode_buckets: tuple[int, ...]  # numbers of sequences, rising; empty without full graphs
    token_buckets: tuple[int, ...]  # numbers of tokens, rising; empty without piecewise graphs
    max_num_seqs: int  # including padding
    max_num_tokens: int  # including padding

    @classmethod
    def of(cls, config: ExecutorConfig, max_seqs_per_batch: int, max_model_len: int, device: torch.device) -> Sizes:
        """The sizes for a config. Default buckets are rounded up, so that a step at the limit still has a graph."""
        on_cpu = device.type == "cpu"
        decode: tuple[int, ...] = ()
        tokens: tuple[int, ...] = ()
        if config.runtime is not None:
            possible = min(config.max_tokens_per_batch, max_seqs_per_batch * max_model_len)
            tokens = token_buckets(min(possible, config.graph_token_budget or (128 if on_cpu else 8192)))
            if config.python_graph_backend != "piecewise":
                if config.graph_buckets:
                    decode = parse_buckets(config.graph_buckets)
                elif on_cpu:
                    decode = _cpu_decode_buckets(max_seqs_per_batch, max_model_len)
                else:
                    decode = sequence_buckets(max_seqs_per_batch)
        return cls(
            decode_buckets=decode,
            token_buckets=tokens,
            max_num_seqs=max((max_seqs_per_batch, *decode[-1:])),
            max_num_tokens=max((config.max_tokens_per_batch, *decode[-1:], *tokens[-1:])),
        )


def _cpu_decode_buckets(max_num_seqs: int, max_model_len: int) -> tuple[int, ...]:
    """Powers of two that hold `max_num_seqs`, as far as a graph of that size is worth it on a CPU; at least 1.

    A captured decode step of the torch backend reads `max_model_len` keys of each sequence.
    """
    largest = min(max_num_seqs, max(_MAX_KEYS_OF_CPU_GRAPH // max_model_len, 1))
    buckets = tuple(2**i for i in range((max_num_seqs - 1).bit_length() + 1))
    return tuple(size for size in buckets if size < 2 * largest and (size <= largest or largest == max_num_seqs))


def make_runners(
    model: CausalLM,
    config: ExecutorConfig,
    backend: AttentionBackend,
    sizes: Sizes,
    passes: Sequence[GraphPass],
) -> RunnerSet:
    """Makes the runners of an executor whose caches are bound; nothing is captured yet.

    Raises:
        ValueError: a graph runtime that does not support the model's device.
    """
    calls = ModelCalls(forward=model.forward, compute_logits=model.compute_logits, backend=backend)
    eager = EagerRunner(calls)
    if config.runtime is None:
        preferred: list[CapturingRunner] = []
        if config.python_graph_backend != "off":
            preferred.append(
                CompiledRunner(
                    calls,
                    compiler=config.python_graph_backend,
                    passes=passes,
                )
            )
        return RunnerSet(eager, preferred, eager_is_error=config.eager_is_error)
    runtime = create_runtime(config.runtime, model.device)
    preferred = []
    misses = []
    if sizes.decode_buckets:
        if config.cut_ops or config.graph_cut_collectives:
            misses.append((DecodeGraphRunner.name, EagerReason.OPS_NOT_CAPTURED))
        elif Phase.DECODE in backend.capabilities.full_graph_phases:
            preferred.append(
                DecodeGraphRunner(
                    calls,
                    runtime,
                    buckets=sizes.decode_buckets,
                    logits_in_graph=config.logits_in_graph,
                )
            )
        else:
            misses.append((DecodeGraphRunner.name, EagerReason.BACKEND_CANNOT_CAPTURE))
    preferred.append(
        PiecewiseGraphRunner(
            calls,
            runtime,
            buckets=sizes.token_buckets,
            cut_ops=config.cut_ops,
            cut_collectives=config.graph_cut_collectives,
        )
    )
    return RunnerSet(eager, preferred, runtime=runtime, eager_is_error=config.eager_is_error, misses=misses)
