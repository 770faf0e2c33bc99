"""Measures the error between two traces, by entry and by token.

Owns the matching of entries, the error measures and the verdict. T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..loading import WeightMap
from .matching import Matching
from .routing import Flip, differing_rows, judged, match
from .trace import LOGITS, Trace, describe

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
    only_theirs: tuple[str, ...] = ()  # the reference's modules with parameters and without a counterpart
    not_comparable: Mapping[str, str] = field(default_factory=dict)  # entry -> reason
    declared: tuple[str, ...] = ()  # what the port declares of names, as sentences
    flips: tuple[Flip, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)  # router -> the first token left out from it on

    @property
    def first_departure(self) -> EntryError | None:
        """The first entry beyond the tolerance: the mistake is there or just before."""
        return next((entry for entry in self.entries if entry.departs(self.tolerance)), None)

    @property
    def first_wrong_flip(self) -> Flip | None:
        """The first flip that rounding errors do not explain."""
        return next((flip for flip in self.flips if flip.beyond_rounding), None)

    @property
    def passed(self) -> bool:
        return self.first_departure is None and self.first_wrong_flip is None

    @property
    def flip_is_first(self) -> bool:
        """Whether the first wrong flip comes before the first entry beyond the tolerance."""
        flip, departure = self.first_wrong_flip, self.first_departure
        if flip is None or departure is None:
            return flip is not None
        names = [entry.name for entry in self.entries]
        if flip.router in names:  # its logits, which come before the choice
            return names.index(departure.name) > names.index(flip.router)
        block = flip.router.rsplit(".", 1)[0]
        inside = [index for index, name in enumerate(names) if name == block or name.startswith(f"{block}.")]
        return bool(inside) and names.index(departure.name) >= inside[0]


def compare_traces(
    ours: Trace,
    theirs: Trace,
    weight_map: WeightMap,
    *,
    tolerance: float,
    names: Mapping[str, str | None] | None = None,
) -> Report:
    """Match the entries by name and measure their errors. A fused entry is compared with its concatenated sources.

    `names` is the port's `CausalLM.compare_names`. A reference that was not made to choose our experts (a dump) is
    compared up to the first token with another choice, from that router on. ValueError for traces of different tokens,
    and for a reference without logits of our shape.
    """
    if ours.token_ids != theirs.token_ids:
        raise ValueError(f"the traces are of different tokens: {len(ours.token_ids)} and {len(theirs.token_ids)}")
    theirs = theirs.renamed(weight_map.family_name)  # a model of several (vision, text) has its text model there
    if LOGITS not in theirs.entries:
        raise ValueError(f"the reference has no {LOGITS}")
    if ours.entries[LOGITS].shape != theirs.entries[LOGITS].shape:
        shapes = [list(trace.entries[LOGITS].shape) for trace in (ours, theirs)]
        raise ValueError(f"{LOGITS} are {shapes[0]}, but the reference has {shapes[1]}")
    matching = Matching(theirs, weight_map, names or {})
    flips = [*theirs.flips, *later_flips(ours, theirs, tolerance)]
    first_left_out = left_out(flips[len(theirs.flips) :])
    errors, only_ours, not_comparable = [], [], {}
    num_rows = len(ours.token_ids)
    for name in dict.fromkeys((*ours.entries, *ours.unusable)):
        num_rows = min([num_rows, *(row for router, row in first_left_out.items() if is_after(name, router, ours))])
        found = matching.find(name)
        if found is None:
            if not matching.excludes(name):
                only_ours.append(name)
        elif isinstance(found, str) or name in ours.unusable:
            theirs_is = found if isinstance(found, str) else describe(found)
            ours_is = ours.unusable.get(name) or describe(ours.entries[name])
            not_comparable[name] = f"ours is {ours_is}, the reference's {theirs_is}"
        elif found.shape != ours.entries[name].shape:
            not_comparable[name] = f"ours is {describe(ours.entries[name])}, the reference's {describe(found)}"
        elif not num_rows:
            not_comparable[name] = "no token is left to compare"
        else:
            errors.append(_error(name, ours.entries[name][:num_rows], found[:num_rows]))
    return Report(
        entries=tuple(errors),
        positions=_positions(
            ours.token_ids[:num_rows], ours.entries[LOGITS][:num_rows], theirs.entries[LOGITS][:num_rows]
        ),
        only_ours=tuple(only_ours),
        only_theirs=tuple(name for name in theirs.weighted if name not in matching.used),
        not_comparable=not_comparable,
        declared=tuple(matching.sentences()),
        flips=tuple(flips),
        left_out=first_left_out,
        tolerance=tolerance,
    )


def later_flips(ours: Trace, theirs: Trace, tolerance: float) -> Iterator[Flip]:
    """The flips against the experts that the reference used. Without its router, the tolerance bounds the rounding."""
    num_rows = len(ours.token_ids)
    for router, name in match(ours.choices, theirs.choices).items():
        reference = theirs.choices[router]
        rows = [row for row in differing_rows(ours.choices[name].experts, reference.experts) if row < num_rows]
        if not rows:
            continue
        num_rows = rows[0]  # the later tokens attend to it
        scores = reference.scores
        if scores is None:
            scores = torch.zeros(len(reference.experts), reference.num_experts)
        largest = scores.masked_fill(scores.isinf(), 0).abs().amax(-1, keepdim=True)
        rounding = (tolerance * largest).expand(scores.shape)
        yield from judged(router, rows, ours.choices[name].experts, reference.experts, scores, rounding)


def left_out(flips: Sequence[Flip]) -> dict[str, int]:
    """router -> the first token that cannot be compared from it on."""
    first: dict[str, int] = {}
    for flip in flips:
        first[flip.router] = min(first.get(flip.router, flip.token), flip.token)
    return first


def is_after(name: str, router: str, ours: Trace) -> bool:
    """Whether the entry `name` of ours is computed from the choice of `router`."""
    order = list(dict.fromkeys((*ours.entries, *ours.unusable)))
    inside = [index for index, one in enumerate(order) if router == one or router.startswith(f"{one}.")]
    return bool(inside) and order.index(name) >= inside[0]


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
