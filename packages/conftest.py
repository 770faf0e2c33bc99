"""Shared by the packages' tests: builds and runs the example projects of docs/backends.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "backends.md").read_text()


@dataclass(frozen=True, slots=True, kw_only=True)
class PageProject:
    """A project of the page, installed into `folder / "installed"`."""

    folder: Path
    section: str  # of the page

    def run(self, *command: str) -> str:
        """Runs Python with the installed project; returns stdout. A non-zero exit fails the test."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder / "installed"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *command], cwd=self.folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def num_passed(self, test_file: str) -> int:
        """Runs the page's own tests; returns how many passed."""
        result = self.run("-m", "pytest", "-q", "-p", "no:cacheprovider", test_file)
        passed = re.search(r"^(\d+) passed", result, flags=re.MULTILINE)
        assert passed is not None, result
        return int(passed[1])

    def run_usage(self) -> list[str]:
        """Runs the code block of the section's step 4; returns the words that it prints."""
        (code,) = re.findall(r"```python\n(.*?)```", self.section.partition("### 4. Use it\n")[2], flags=re.DOTALL)
        return self.run("-c", code).split()


@pytest.fixture(scope="module")
def make_page_project(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], PageProject]:
    """`make(heading, name)`: the project of a section, with files pyproject.toml, xllm_{name}.py and test_{name}.py."""

    def make(heading: str, name: str) -> PageProject:
        section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
        files = dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", section, flags=re.DOTALL | re.MULTILINE))
        assert set(files) == {"pyproject.toml", f"xllm_{name}.py", f"test_{name}.py"}
        folder = tmp_path_factory.mktemp("project")
        for file, text in files.items():
            (folder / file).write_text(text)
        install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
        subprocess.run([sys.executable, *install, "--target", folder / "installed", folder], check=True)
        (folder / f"xllm_{name}.py").unlink()  # the tests must find the installed one
        return PageProject(folder=folder, section=section)

    return make
