"""README.md and CONTRIBUTING.md name only paths that exist, and README.md's map has every top-level folder."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
# A word in backticks, or the target of a link, that looks like a path of this repository.
QUOTED = re.compile(r"`(\.?[\w-][\w./-]*)`|\]\(([\w./-]+)\)")


def paths_in(text: str) -> set[str]:
    """The paths that a page names: words with a slash or a file ending, and the names of top-level folders."""
    words = {quoted or target for quoted, target in QUOTED.findall(text)}
    return {
        word for word in words if "/" in word or re.search(r"\.(py|md|sh|toml)$", word) or word in top_level_folders()
    }


def top_level_folders() -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=REPO, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return {path.split("/")[0] for path in listed if "/" in path}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_every_named_path_exists(page: str) -> None:
    named = paths_in((REPO / page).read_text())
    assert {"packages", "integration", "ci"} <= named
    assert [path for path in sorted(named) if not (REPO / path).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_map_has_every_top_level_folder(page: str) -> None:
    rows = re.findall(r"^\| `([\w.-]+)` \|", (REPO / page).read_text(), re.MULTILINE)
    assert top_level_folders() <= set(rows)


def test_contributing_says_where_each_of_eight_changes_goes() -> None:
    changes = (REPO / "CONTRIBUTING.md").read_text().partition("## Where changes go\n")[2]
    sections = dict(re.findall(r"^### (.+)\n((?:(?!###).*\n)+)", changes, re.MULTILINE))
    assert len(sections) == 8
    assert [title for title, text in sections.items() if len(paths_in(text)) < 4] == []
