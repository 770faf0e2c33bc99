"""Compares the traces of several tensor-parallel ranks with that of one, and finds the first module that differs.

A rank's tensor is the whole value, this rank's share of the features, or this rank's term of a sum over the ranks. The
layers of this package say which. Of other modules, each of the three is accepted. T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from xllm_attention import Attention

from ..causal_lm import CausalLM
from ..layers import (
    Experts,
    LinearBase,
    QKVParallelLinear,
    ResidualLayerNorm,
    ResidualRMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ..layers.vocab_parallel_embedding import ParallelLMHead
from .ours import trace_ours
from .report import is_after, later_flips, left_out
from .trace import LOGITS, Trace

_MODEL = "the model class's own forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDifference:
    """The first module whose result on several ranks is not that on one."""

    name: str
    rank: int | None  # that differs; None: the ranks' results together do
    relative_error: float
    hint: str = ""

    def __str__(self) -> str:
        where = "" if self.rank is None else f" on rank {self.rank}"
        hint = f"; {self.hint}" if self.hint else ""
        return (
            f"{self.name} is the first module that differs from one rank, with relative error "
            f"{self.relative_error:.2e}{where}{hint}"
        )


def trace_rank(model: CausalLM, token_ids: Sequence[int]) -> Trace:
    """Every tensor that a module returns, as `name`, `name[1]`, ...; of attention also queries, keys and values."""
    return trace_ours(model, token_ids, record=_record)


def _record(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(module, RotaryEmbedding):
        return  # one module serves all layers; the attention's queries and keys show its result
    prefix = "" if name else _MODEL
    if isinstance(module, Attention):
        named = zip((".q", ".k", ".v"), args, strict=False)
        yield from (pair for pair in named if pair[1] is not None)  # a latent layer gets no v
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    for index, tensor in enumerate(tensors):
        yield f"{prefix}[{index}]" if index else prefix, tensor


def first_difference(model: CausalLM, one: Trace, ranks: Sequence[Trace], *, tolerance: float) -> RankDifference | None:
    """The first entry, in order of execution, that differs between `one` rank and the `ranks`; None: no entry does.

    `model` is that of one rank. Tokens after one with other experts are left out, as against a dump.
    """
    limits = left_out(list(later_flips(one, ranks[0], tolerance)))
    num_rows = len(one.token_ids)
    unsummed: str | None = None  # the first module of another class whose terms nothing has summed yet
    for name, want in one.entries.items():
        num_rows = min([num_rows, *(row for router, row in limits.items() if is_after(name, router, one))])
        absent = [rank for rank, trace in enumerate(ranks) if name not in trace.entries]
        if absent:
            return RankDifference(name=name, rank=absent[0], relative_error=float("inf"), hint="it does not run there")
        got = [trace.entries[name] for trace in ranks]
        if not num_rows or any(len(rows) != len(one.token_ids) for rows in (want, *got)):
            continue  # the module runs more than once, so its rows are of several layers
        module = _module(model, name)
        error, rank, is_sum = _compared(module, name, want[:num_rows], [rows[:num_rows] for rows in got], tolerance)
        if error <= tolerance:
            if is_sum and not isinstance(module, (RowParallelLinear, Experts)):
                unsummed = unsummed or name
            elif isinstance(module, (ResidualRMSNorm, ResidualLayerNorm)):
                unsummed = None
            continue
        if unsummed is not None and getattr(module, "tp", None) is None:
            hint = f"its terms of a sum over the ranks are not summed before {name}"
            return RankDifference(name=unsummed, rank=None, relative_error=error, hint=hint)
        hint = "every module agrees: the fault is in compute_logits" if name == LOGITS else ""
        return RankDifference(name=name, rank=rank, relative_error=error, hint=hint)
    return None


def _module(model: CausalLM, entry: str) -> nn.Module | None:
    name = entry.split("[")[0]
    modules = dict(model.named_modules())
    return modules.get(name) or modules.get(name.rpartition(".")[0] if name.endswith((".q", ".k", ".v")) else name)


def _compared(
    module: nn.Module | None, name: str, want: torch.Tensor, got: Sequence[torch.Tensor], tolerance: float
) -> tuple[float, int | None, bool]:
    """(relative error, the rank that has it, whether the ranks hold terms of a sum), of the fitting interpretation."""
    width, num_ranks = want.shape[1], len(got)
    if all(rows.shape[1] == width for rows in got):
        equal = [_error(rows, want) for rows in got]
        worst = max(range(num_ranks), key=lambda rank: equal[rank])
        total = _error(torch.stack(list(got)).sum(0), want)
        if isinstance(module, (RowParallelLinear, Experts)):
            if not module.reduce_results:
                return total, None, True
            return equal[worst], worst, False
        if isinstance(module, (VocabParallelEmbedding, ParallelLMHead)):
            return equal[worst], worst, False
        if equal[worst] > tolerance >= total:
            return total, None, True
        return equal[worst], worst, False
    sizes = {rows.shape[1] for rows in got}
    if len(sizes) > 1 or any(size > width for size in sizes):
        return float("inf"), None, False
    found = [_shares(want, got, parts) for parts in _parts(module, width)]
    errors = [max(of_rank) for of_rank in found if of_rank]
    if not errors:
        return float("inf"), None, False
    best = min((of_rank for of_rank in found if of_rank), key=max)
    if max(best) > tolerance and not _is_known(module):
        return 0.0, None, False  # a share whose layout is not known
    return max(best), best.index(max(best)), False


def _parts(module: nn.Module | None, width: int) -> list[list[int]]:
    """The widths, over all ranks, of the parts of a result that are sharded one by one; several guesses."""
    if isinstance(module, LinearBase) and not isinstance(module, QKVParallelLinear):
        shards = getattr(module, "shards", ())
        return [[shard.total for shard in shards]]
    if isinstance(module, (Attention, QKVParallelLinear)):
        return [[width]]
    return [[width // number] * number for number in (1, 2, 3) if width % number == 0]


def _is_known(module: nn.Module | None) -> bool:
    """Whether a rank's share of the module's result must fit one of `_parts`.

    That is so of attention and linear layers, and of modules that compute feature by feature: a norm, an activation.
    """
    if module is None or isinstance(module, (Attention, LinearBase)):
        return module is not None
    return not list(module.children()) and all(parameter.ndim == 1 for parameter in module.parameters())


def _shares(want: torch.Tensor, got: Sequence[torch.Tensor], parts: Sequence[int]) -> list[float]:
    """The error of each rank's share; [] if the widths do not fit. Consecutive ranks hold one replicated share."""
    num_ranks, size = len(got), got[0].shape[1]
    if len(parts) == 1:
        if parts[0] % size or num_ranks * size % parts[0]:
            return []
        replicas = num_ranks * size // parts[0]
        shares = [want[:, (rank // replicas) * size :][:, :size] for rank in range(num_ranks)]
        return [_error(rows, share, want) for rows, share in zip(got, shares, strict=True)]
    if any(part % num_ranks for part in parts) or sum(parts) != size * num_ranks:
        return []
    errors = [0.0] * num_ranks
    for part, columns in zip(torch.split(want, list(parts), dim=1), _columns(parts, num_ranks), strict=True):
        share = part.shape[1] // num_ranks
        for rank, rows in enumerate(got):
            wanted = part[:, rank * share : (rank + 1) * share]
            errors[rank] = max(errors[rank], _error(rows[:, columns], wanted, want))
    return errors


def _columns(parts: Sequence[int], num_ranks: int) -> Iterator[slice]:
    start = 0
    for part in parts:
        yield slice(start, start + part // num_ranks)
        start += part // num_ranks


def _error(value: torch.Tensor, want: torch.Tensor, whole: torch.Tensor | None = None) -> float:
    """max |x - y| / max |y|, y over all ranks; inf where the value is not finite."""
    if not want.numel():
        return 0.0
    error = float((value - want).abs().max())
    scale = float((want if whole is None else whole).abs().max())
    return (error / scale if scale else error) if bool(value.isfinite().all()) else float("inf")
