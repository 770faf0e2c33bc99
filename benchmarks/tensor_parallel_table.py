"""Fills the tables of docs/tensor-parallel.md from the results of collectives.py and of sweep.py on several ranks.

    python benchmarks/tensor_parallel_table.py [--check]

A table stands between `<!-- table of FILE.json -->` and `<!-- end of table -->`. --check writes nothing and fails when
one is not what the results say.
"""

from __future__ import annotations

import argparse
import re
import sys

import collectives
import results as result_files
from table import table

PAGE = result_files.ROOT / "docs" / "tensor-parallel.md"
_TABLE = re.compile(r"(<!-- table of (\S+\.json) -->\n\n).*?(?=<!-- end of table -->)", re.DOTALL)


def filled(page: str) -> str:
    """The page with every table made anew."""
    return _TABLE.sub(lambda match: match[1] + _table_of(match[2]) + "\n", page)


def _table_of(name: str) -> str:
    path = result_files.RESULTS / name
    if name.startswith("collectives"):
        return collectives.table(result_files.read(path, "collectives")["results"]["rows"])
    return table(result_files.read(path, "sweep"))


def main() -> None:
    """Writes or checks the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    before = PAGE.read_text()
    text = filled(before)
    if not parser.parse_args().check:
        PAGE.write_text(text)
    elif before != text:
        sys.exit(f"{PAGE.name} is not what the results say: run benchmarks/tensor_parallel_table.py")


if __name__ == "__main__":
    main()
