"""Redirects Python's standard streams in an embedding host. Needs the standard library only.

The C++ bridge embeds this file's text and runs it before the site module and any package is imported, since both may
print.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import TextIO, cast

LogSink = Callable[[int, str, str], None]
"""(level, logger, message)."""

_INFO, _WARNING = 20, 30  # of the logging module, which is not imported here


class _SinkStream(io.TextIOBase):
    """A text stream that sends complete lines to the host. It has no file descriptor and no byte buffer."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, sink: LogSink, level: int, name: str) -> None:
        self._sink = sink
        self._level = level
        self._name = name
        self._line = ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).replace("\r", "\n").split("\n")
        for line in lines:
            if line:
                self._sink(self._level, self._name, encodable(line))
        return len(text)

    def flush(self) -> None:
        """Does nothing: a line is sent when it is complete."""

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True


def encodable(text: str) -> str:
    """The text with surrogates escaped, so that UTF-8 can encode it."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def redirect_streams(sink: LogSink | None) -> tuple[TextIO | None, TextIO | None]:
    """Sends printed lines to the sink, or to stderr without one. Returns the streams that were stdout and stderr.

    stdout belongs to the host: Python prints nothing there.
    """
    replaced = (sys.stdout, sys.stderr)
    if sink is None:
        sys.stdout = sys.stderr
    else:
        sys.stdout = cast(TextIO, _SinkStream(sink, _INFO, "stdout"))
        sys.stderr = cast(TextIO, _SinkStream(sink, _WARNING, "stderr"))
    return replaced
