"""Fills the tables of docs/graphs.md, docs/layers.md and docs/tensor-parallel.md from the result files.

    python benchmarks/page_tables.py [--check]

A table is between `<!-- table of FILE.json -->` and `<!-- end of table -->`; a glob pattern selects several files of
tests. --check writes nothing and fails when a table differs from the results.
"""

from __future__ import annotations

import argparse
import re
import sys

import collectives
import layers_table
import results as result_files
import tested
from table import table

PAGES = tuple(result_files.ROOT / "docs" / name for name in ("graphs.md", "layers.md", "tensor-parallel.md"))
_TABLE = re.compile(r"(<!-- table of (\S+\.json) -->\n\n).*?(?=<!-- end of table -->)", re.DOTALL)


def filled(page: str) -> str:
    """The page with every table regenerated."""
    return _TABLE.sub(lambda match: match[1] + _table_of(match[2]) + "\n", page)


def _table_of(name: str) -> str:
    path = result_files.RESULTS / name
    if name.startswith("tests"):
        return tested.table(result_files.RESULTS.glob(name))
    if name.startswith("collectives"):
        return collectives.table(result_files.read(path, "collectives")["results"]["rows"])
    if name.startswith("layers"):
        return layers_table.table(result_files.read(path, "layers")["results"])
    return table(result_files.read(path, "sweep"))


def main() -> None:
    """Writes or checks the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for page in PAGES:
        before = page.read_text()
        text = filled(before)
        if not check:
            page.write_text(text)
        elif before != text:
            sys.exit(f"{page.name} has a table that differs from the results: run benchmarks/page_tables.py")


if __name__ == "__main__":
    main()
