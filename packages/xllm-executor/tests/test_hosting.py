"""What the bridge asks of Python about the process, without a C++ host: output, figures and the end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator

import pytest

from xllm_executor import hosting

Record = tuple[int, str, str]


@pytest.fixture
def redirect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[Record]]]:
    """Redirects to a list when called, from inside the test: pytest gives each phase streams of its own."""
    root = logging.getLogger()
    handlers = list(root.handlers)

    def start() -> list[Record]:
        monkeypatch.setattr(sys, "stdout", sys.stdout)
        monkeypatch.setattr(sys, "stderr", sys.stderr)
        seen: list[Record] = []
        hosting.redirect_output(lambda level, name, text: seen.append((level, name, text)))
        return seen

    yield start
    logging.captureWarnings(False)
    root.handlers[:] = handlers


def test_records_and_lines_reach_the_sink(redirect: Callable[[], list[Record]]) -> None:
    records = redirect()
    logging.getLogger("a.b").warning("value %d", 3)
    print("one", end="")
    print(" line\nand another")
    print("bar 50%\rbar 100%", file=sys.stderr)
    assert (30, "a.b", "value 3") in records
    assert [text for _, name, text in records if name == "stdout"] == ["one line", "and another"]
    assert [text for _, name, text in records if name == "stderr"] == ["bar 50%", "bar 100%"]
    assert not sys.stdout.isatty()


def test_without_a_sink_stdout_is_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    hosting.redirect_output(None)
    assert sys.stdout is sys.stderr


def test_metrics_are_flat_numbers() -> None:
    numbers = hosting.metrics({"steps": {"eager": 2}, "plans": [1, 3], "name": "text", "on": True})
    assert numbers.pop("memory.resident_bytes") > 10**6
    assert {name: value for name, value in numbers.items() if not name.startswith("memory.")} == {
        "steps.eager": 2.0,
        "plans.0": 1.0,
        "plans.1": 3.0,
        "on": 1.0,
    }


def test_shut_down_ends_every_executor_that_lives() -> None:
    ended = []

    class Executor:
        def __init__(self, name: str) -> None:
            self.name = name

        def shutdown(self) -> None:
            ended.append(self.name)

    first, second = Executor("first"), Executor("second")
    hosting.register_executor(first)
    hosting.register_executor(second)
    del second
    hosting.shut_down()
    assert ended == ["first"]
