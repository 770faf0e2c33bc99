"""Writes a report of a comparison as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from .report import Report


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
    lines += [*_unseen(report), *_verdict(report)]
    return "\n".join(lines)


def _unseen(report: Report) -> Iterator[str]:
    """What was not compared, or not as it is named."""
    for sentence in report.declared:
        yield f"declared by the port{sentence}"
    for name, reason in report.not_comparable.items():
        yield f"not comparable: {name}: {reason}"
    if report.only_ours:
        yield f"without a counterpart: {', '.join(collapsed(report.only_ours))}"
    if report.only_theirs:
        yield f"compared only within the modules around them: {', '.join(collapsed(report.only_theirs))}"
    rounded = [flip for flip in report.flips if not flip.beyond_rounding]
    for flip in rounded:
        yield f"within rounding: {flip}"
    for router, token in report.left_out.items():
        yield f"left out from {router} on: token {token} and all later ones, which attend to it"


def _verdict(report: Report) -> Iterator[str]:
    first, flip = report.first_departure, report.first_wrong_flip
    if flip is not None and report.flip_is_first:
        count = sum(one.beyond_rounding for one in report.flips)
        yield f"FAIL: {flip} ({count} of {len(report.flips)} flips are beyond rounding)"
    elif first is not None:
        count = sum(entry.departs(report.tolerance) for entry in report.entries)
        yield (
            f"FAIL: {first.name} departs first, with relative error {first.relative_error:.2e} "
            f"beyond {report.tolerance:g} ({count} of {len(report.entries)} entries do)"
        )
    else:
        worst = max(report.entries, key=lambda entry: entry.relative_error)
        yield (
            f"PASS: all {len(report.entries)} entries within {report.tolerance:g}; "
            f"the worst is {worst.name} with {worst.relative_error:.2e}"
        )


def collapsed(names: Iterable[str]) -> list[str]:
    """The names with `*` for a layer's or an expert's index, each once."""
    return list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names))
