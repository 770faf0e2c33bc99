"""Output redirection and shutdown, without a C++ host."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest

from xllm_executor import hosting
from xllm_executor.streams import redirect_streams

Record = tuple[int, str, str]


@pytest.fixture
def redirect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[Record]]]:
    """Redirects to a list. The test itself calls it, since pytest replaces the streams between set-up and test."""
    root = logging.getLogger()
    handlers = list(root.handlers)

    def start() -> list[Record]:
        monkeypatch.setattr(sys, "stdout", sys.stdout)
        monkeypatch.setattr(sys, "stderr", sys.stderr)
        seen: list[Record] = []

        def sink(level: int, name: str, text: str) -> None:
            seen.append((level, name, text))

        hosting.redirect_logging(sink, redirect_streams(sink))
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


@pytest.fixture
def make_logger() -> Iterator[Callable[..., logging.Logger]]:
    """`make_logger(name, stream, propagate)`: one with a handler of its own, as libraries make them on import."""
    names: list[str] = []

    def make(name: str, stream: TextIO, propagate: bool) -> logging.Logger:
        logger = logging.getLogger(name)
        names.append(name)
        logger.propagate = propagate
        logger.addHandler(logging.StreamHandler(stream))
        return logger

    yield make
    for name in names:
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True


def test_loggers_that_write_to_the_old_streams_write_to_the_sink(
    redirect: Callable[[], list[Record]],
    make_logger: Callable[..., logging.Logger],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """torch's loggers are of this kind: they do not propagate. Each record comes once."""
    with (tmp_path / "log").open("w") as file:
        make_logger("aloof", sys.stderr, False)
        make_logger("aloof.child", sys.stdout, True)
        make_logger("open", sys.stderr, True)
        make_logger("filed", file, False)
        records = redirect()
        for name in ("aloof", "aloof.child", "open", "filed"):
            logging.getLogger(name).warning("from %s", name)
    assert records == [(30, name, f"from {name}") for name in ("aloof", "aloof.child", "open")]
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "log").read_text() == "from filed\n"


def test_a_record_that_cannot_be_formatted_is_reported_and_does_not_raise(
    redirect: Callable[[], list[Record]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", True)
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's handler, which raises
    records = redirect()
    logging.getLogger("a").error("%d", "x")
    assert ("stderr", "--- Logging error ---") in [(name, text) for _, name, text in records]


def test_text_that_is_no_utf_8_is_escaped(redirect: Callable[[], list[Record]]) -> None:
    records = redirect()
    print("a file \udcff")
    logging.getLogger("a").error("a file \udcff")
    assert [text for _, _, text in records] == ["a file \\udcff"] * 2


def test_the_sinks_streams_say_what_they_cannot_do(redirect: Callable[[], list[Record]]) -> None:
    records = redirect()
    sys.stdout.writelines(["one\n", "two\n"])
    assert [text for _, _, text in records] == ["one", "two"]
    assert not sys.stdout.closed
    with pytest.raises(io.UnsupportedOperation, match="fileno"):
        sys.stderr.fileno()


def test_without_a_sink_stdout_is_stderr(
    monkeypatch: pytest.MonkeyPatch, make_logger: Callable[..., logging.Logger], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    logger = make_logger("aloof", sys.stdout, False)
    hosting.redirect_logging(None, redirect_streams(None))
    assert sys.stdout is sys.stderr
    logger.warning("a record")
    assert capsys.readouterr() == ("", "a record\n")


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


def test_shut_down_goes_on_past_an_executor_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    class Executor:
        def shutdown(self) -> None:
            ended.append("executor")
            raise RuntimeError(f"failure {len(ended)}")

    executors = [Executor(), Executor()]
    for executor in executors:
        hosting.register_executor(executor)
    monkeypatch.setattr(hosting.tensor_parallel, "leave", lambda: ended.append("group"))
    with pytest.raises(RuntimeError, match="failure 1") as failure:
        hosting.shut_down()
    assert ended == ["executor", "executor", "group"]
    assert failure.value.__notes__ == ["then: RuntimeError: failure 2"]
