"""Measures the error between two traces, by entry and by token.

Owns the matching of entries, the error measures and the verdict. T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..loading import WeightMap
from .trace import LOGITS, Trace

# Largest relative error of a correct model, by dtype; it grows with depth.
TOLERANCES: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryError:
    """One entry's error."""

    name: str
    max_error: float  # max |x - y|
    relative_error: float  # max |x - y| / max |y|; inf where either is not finite
    cosine: float  # of all rows as one vector

    def departs(self, tolerance: float) -> bool:
        return self.relative_error > tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The most likely token at one position, of both models."""

    token_id: int  # the input
    ours: int
    theirs: int
    margin: float  # the reference's largest logit minus its second largest
    max_error: float  # of the logits here


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    entries: tuple[EntryError, ...]  # in order of execution
    positions: tuple[Position, ...]
    only_ours: tuple[str, ...]  # entries without a counterpart in the reference
    tolerance: float

    @property
    def first_departure(self) -> EntryError | None:
        """The first entry beyond the tolerance: the mistake is there or just before."""
        return next((entry for entry in self.entries if entry.departs(self.tolerance)), None)

    @property
    def passed(self) -> bool:
        return self.first_departure is None


def compare_traces(ours: Trace, theirs: Trace, weight_map: WeightMap, *, tolerance: float) -> Report:
    """Match the entries by name and measure their errors. A fused entry is compared with its concatenated sources.

    ValueError for traces of different tokens, entries of different shapes, and a reference without logits.
    """
    if ours.token_ids != theirs.token_ids:
        raise ValueError(f"the traces are of different tokens: {len(ours.token_ids)} and {len(theirs.token_ids)}")
    # A model of several (vision, text) has its text model under a prefix.
    theirs = Trace(
        token_ids=theirs.token_ids,
        entries={weight_map.family_name(name): value for name, value in theirs.entries.items()},
    )
    errors, only_ours = [], []
    for name, value in ours.entries.items():
        reference = _counterpart(name, theirs, weight_map)
        if reference is None:
            only_ours.append(name)
        elif reference.shape != value.shape:
            raise ValueError(f"{name} is {list(value.shape)}, but the reference has {list(reference.shape)}")
        else:
            errors.append(_error(name, value, reference))
    if LOGITS not in theirs.entries:
        raise ValueError(f"the reference has no {LOGITS}")
    return Report(
        entries=tuple(errors),
        positions=_positions(ours.token_ids, ours.entries[LOGITS], theirs.entries[LOGITS]),
        only_ours=tuple(only_ours),
        tolerance=tolerance,
    )


def _counterpart(name: str, theirs: Trace, weight_map: WeightMap) -> torch.Tensor | None:
    if name in theirs.entries:
        return theirs.entries[name]
    module = name.rsplit(".", 1)[-1]
    sources = [name.removesuffix(module) + source for source in weight_map.fused.get(module, ())]
    if sources and all(source in theirs.entries for source in sources):
        return torch.cat([theirs.entries[source] for source in sources], dim=1)
    return None


def _error(name: str, value: torch.Tensor, reference: torch.Tensor) -> EntryError:
    difference = float((value - reference).abs().max())
    scale = float(reference.abs().max())
    finite = bool(value.isfinite().all()) and bool(reference.isfinite().all())
    relative = (difference / scale if scale else difference) if finite else float("inf")
    cosine = torch.nn.functional.cosine_similarity(value.flatten().double(), reference.flatten().double(), dim=0)
    return EntryError(name=name, max_error=difference, relative_error=relative, cosine=float(cosine))


def _positions(token_ids: tuple[int, ...], ours: torch.Tensor, theirs: torch.Tensor) -> tuple[Position, ...]:
    top = theirs.topk(2, dim=-1)
    rows = zip(
        token_ids,
        ours.argmax(-1).tolist(),
        top.indices[:, 0].tolist(),
        (top.values[:, 0] - top.values[:, 1]).tolist(),
        (ours - theirs).abs().amax(-1).tolist(),
        strict=True,
    )
    return tuple(
        Position(token_id=token_id, ours=mine, theirs=their, margin=margin, max_error=error)
        for token_id, mine, their, margin, error in rows
    )


def format_report(report: Report) -> str:
    """The tables and the verdict, as text."""
    width = max(len(entry.name) for entry in report.entries)
    lines = [f"{'entry':{width}}  max error  rel error  cosine"]
    for entry in report.entries:
        flag = "  <- beyond tolerance" if entry.departs(report.tolerance) else ""
        lines.append(
            f"{entry.name:{width}}  {entry.max_error:9.2e}  {entry.relative_error:9.2e}  {entry.cosine:.8f}{flag}"
        )
    lines += ["", "position  input  ours  theirs  margin     max error"]
    for index, position in enumerate(report.positions):
        flag = "" if position.ours == position.theirs else "  <- differs"
        lines.append(
            f"{index:8}  {position.token_id:5}  {position.ours:4}  {position.theirs:6}  {position.margin:9.2e}  "
            f"{position.max_error:9.2e}{flag}"
        )
    same = sum(position.ours == position.theirs for position in report.positions)
    lines += ["", f"first choices: {same} of {len(report.positions)} the same"]
    if report.only_ours:
        lines.append(f"without a counterpart: {', '.join(report.only_ours)}")
    first = report.first_departure
    if first is None:
        worst = max(report.entries, key=lambda entry: entry.relative_error)
        lines.append(
            f"PASS: all {len(report.entries)} entries within {report.tolerance:g}; "
            f"the worst is {worst.name} with {worst.relative_error:.2e}"
        )
    else:
        count = sum(entry.departs(report.tolerance) for entry in report.entries)
        lines.append(
            f"FAIL: {first.name} departs first, with relative error {first.relative_error:.2e} "
            f"beyond {report.tolerance:g} ({count} of {len(report.entries)} entries do)"
        )
    return "\n".join(lines)
