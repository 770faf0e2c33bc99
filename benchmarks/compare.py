"""Compares two result files of one benchmark and flags differences larger than the noise.

    python benchmarks/compare.py BEFORE.json AFTER.json [--noise 0.03] [--check]

Every number with repeated samples is compared by its median; its noise is the spread of the samples of either file, but
at least --noise. Less is better. With --check, the exit status is 1 when anything is slower by more than its noise.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

KEYS = ("tp", "mode", "batch", "name", "backend", "kind", "context")  # identify a row of a list


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One number in both files."""

    name: str
    before: float
    after: float
    noise: float  # relative

    @property
    def change(self) -> float:
        """Relative to before; above 0 is slower."""
        return self.after / self.before - 1

    @property
    def verdict(self) -> str:
        """`slower`, `faster`, or nothing within the noise."""
        if abs(self.change) <= self.noise:
            return ""
        return "slower" if self.change > 0 else "faster"


def measurements(value: Any, path: str = "") -> Iterator[tuple[str, list[float]]]:
    """Every list of samples in a result, with a name that does not depend on the order of rows."""
    if isinstance(value, dict):
        if "samples" in value:
            yield path, [float(sample) for sample in value["samples"]]
            return
        for key, inner in value.items():
            yield from measurements(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            keys = [f"{key}={inner[key]}" for key in KEYS if isinstance(inner, dict) and key in inner]
            yield from measurements(inner, f"{path}[{', '.join(keys) or index}]")


def compare(before: dict[str, Any], after: dict[str, Any], least_noise: float) -> list[Difference]:
    """The numbers that both documents have. Raises `ValueError` for documents of different benchmarks."""
    if before["benchmark"] != after["benchmark"]:
        raise ValueError(f"results of {before['benchmark']!r} and of {after['benchmark']!r} cannot be compared")
    ours = dict(measurements(before["results"]))
    theirs = dict(measurements(after["results"]))
    return [
        Difference(
            name=name,
            before=median(samples),
            after=median(theirs[name]),
            noise=max(least_noise, _spread(samples), _spread(theirs[name])),
        )
        for name, samples in ours.items()
        if name in theirs
    ]


def main(command: list[str] | None = None) -> int:
    """Prints the comparison as a Markdown table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--noise", type=float, default=0.03)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(command)
    documents = [json.loads(path.read_text()) for path in (arguments.before, arguments.after)]
    differences = compare(documents[0], documents[1], arguments.noise)
    for what in ("device", "versions", "commit"):
        values = [document["stamp"][what] for document in documents]
        if values[0] != values[1]:
            print(f"{what}: {values[0]} -> {values[1]}")
    print("| what | before | after | change | noise | |\n| --- | --- | --- | --- | --- | --- |")
    for one in differences:
        print(
            f"| {one.name} | {one.before:.4g} | {one.after:.4g} | {one.change:+.1%} | {one.noise:.1%} | {one.verdict} |"
        )
    return int(arguments.check and any(one.verdict == "slower" for one in differences))


def _spread(samples: list[float]) -> float:
    return (max(samples) - min(samples)) / median(samples)


if __name__ == "__main__":
    raise SystemExit(main())
