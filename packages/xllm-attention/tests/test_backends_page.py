"""The attention half of docs/backends.md: its project is built, installed, tested and used as the page prints it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def project(make_page_project: Callable[[str, str], Any]) -> Any:
    return make_page_project("Writing an attention backend out of the tree", "example_attention")


def test_the_page_s_own_tests_pass(project: Any) -> None:
    assert project.num_passed("test_example_attention.py") > 50


def test_the_installed_backend_is_used_by_name(project: Any) -> None:
    assert project.run_usage() == ["example", "decode=example,prefill=torch"]
