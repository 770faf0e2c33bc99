"""Writes the outcome of a test run as a result file, from its JUnit report.

pytest --junit-xml REPORT.xml ...
python benchmarks/tested.py REPORT.xml --out benchmarks/results/tests-graph-h200.json [--device cuda]
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import results as result_files


def summary(report: Path) -> dict[str, Any]:
    """Tests by outcome, names of those that did not pass, seconds, passed tests by module, and recorded properties."""
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    outcomes: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    not_passed, notes, seconds = [], [], 0.0
    for suite in suites:
        seconds += float(suite.get("time", 0))
        for case in suite.iter("testcase"):
            tags = {child.tag for child in case}
            notes += [f"{case.get('name')}: {note.get('value')}" for note in case.iter("property")]
            outcome = next((tag for tag in ("error", "failure", "skipped") if tag in tags), "passed")
            outcomes[outcome] += 1
            if outcome == "passed":
                passed[str(case.get("classname"))] += 1
            else:
                not_passed.append(f"{case.get('classname')}::{case.get('name')}")
    return {
        "outcomes": dict(outcomes), "seconds": seconds, "not_passed": sorted(not_passed), "modules": dict(passed),
        "notes": notes,
    }  # fmt: skip


def table(paths: Iterable[Path]) -> str:
    """Result files of tests as a Markdown table, one line per file."""
    lines = ["| part | passed | not passed | device | commit |", "| --- | --- | --- | --- | --- |"]
    for path in sorted(paths):
        document = result_files.read(path, "tests")
        stamp, outcomes = document["stamp"], document["results"]["outcomes"]
        passed = outcomes.get("passed", 0)
        part = path.stem.removeprefix("tests-").rpartition("-")[0]
        others = sum(outcomes.values()) - passed
        lines.append(f"| {part} | {passed} | {others} | {stamp['device']} | {stamp['commit'][:12]} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Reads the report, writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    result_files.write(arguments.out, benchmark="tests", device=arguments.device, results=summary(arguments.report))


if __name__ == "__main__":
    main()
