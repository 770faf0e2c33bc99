"""The graph half of docs/backends.md: its project is built, installed, tested and used as the page prints it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "backends.md").read_text()
SECTION = PAGE.partition("## Writing a graph runtime out of the tree\n")[2].partition("\n## ")[0]
FILES = dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", SECTION, flags=re.DOTALL | re.MULTILINE))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's files; the project is installed into its subfolder `installed`."""
    folder = tmp_path_factory.mktemp("project")
    assert set(FILES) == {"pyproject.toml", "xllm_example_runtime.py", "test_example_runtime.py"}
    for name, text in FILES.items():
        (folder / name).write_text(text)
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([sys.executable, *install, "--target", folder / "installed", folder], check=True)
    (folder / "xllm_example_runtime.py").unlink()  # the tests must find the installed one
    return folder


def _run(project: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(project / "installed"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_s_own_tests_pass(project: Path) -> None:
    result = _run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_example_runtime.py")
    passed = re.search(r"^(\d+) passed", result, flags=re.MULTILINE)
    assert passed is not None, result
    assert int(passed[1]) >= 10


def test_the_installed_runtime_is_made_by_name(project: Path) -> None:
    used = SECTION.partition("### 4. Use it\n")[2]
    (code,) = re.findall(r"```python\n(.*?)```", used, flags=re.DOTALL)
    assert _run(project, "-c", code).split() == ["True", "example"]
