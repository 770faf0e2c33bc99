"""Process-wide services of the C++ bridge: output redirection, metrics and shutdown.

Owns the redirection of logging, warnings and printed lines, and the order of shutdown. A pure Python host needs none
of it.
"""

from __future__ import annotations

import gc
import io
import logging
import resource
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import torch

from . import tensor_parallel

LogSink = Callable[[int, str, str], None]
"""(level, logger, message)."""

_EXECUTORS: weakref.WeakSet[Any] = weakref.WeakSet()


class _SinkHandler(logging.Handler):
    """Sends log records to the host. Level and logger name are separate arguments, so the text leaves them out."""

    def __init__(self, sink: LogSink) -> None:
        super().__init__()
        self._sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._sink(record.levelno, record.name, self.format(record))
        except Exception:  # noqa: BLE001  a bad record must not fail the code that logs it; all handlers do so
            self.handleError(record)


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
                self._sink(self._level, self._name, line)
        return len(text)

    def flush(self) -> None:
        """Does nothing: a line is sent when it is complete."""

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True


def redirect_output(sink: LogSink | None) -> None:
    """Sends log records, warnings and printed lines to the sink, or to stderr without one.

    stdout belongs to the host: Python prints nothing there.
    """
    out, err = (sys.stdout, sys.__stdout__), (sys.stderr, sys.__stderr__)
    if sink is None:
        for _, writer in _stream_handlers(out):
            writer.setStream(sys.stderr)
        sys.stdout = sys.stderr
        return

    def send(level: int, name: str, text: str) -> None:
        sink(level, _encodable(name), _encodable(text))

    handler = _SinkHandler(send)
    logging.getLogger().addHandler(handler)
    # Libraries imported earlier have handlers on the old streams, and torch's loggers do not propagate.
    for logger, writer in _stream_handlers((*out, *err)):
        logger.removeHandler(writer)
        if not _reaches(logger, handler):
            logger.addHandler(handler)
    logging.captureWarnings(True)
    sys.stdout = cast(TextIO, _SinkStream(send, logging.INFO, "stdout"))
    sys.stderr = cast(TextIO, _SinkStream(send, logging.WARNING, "stderr"))


def register_executor(executor: Any) -> None:
    """Registers an executor for `shut_down`, by a weak reference."""
    _EXECUTORS.add(executor)


def shut_down() -> None:
    """Releases graphs, then process groups, then garbage: a captured graph must not outlive its process group.

    An error does not stop the rest. The first one is raised at the end, with the others as notes.
    """
    errors: list[Exception] = []
    for end in (*(executor.shutdown for executor in list(_EXECUTORS)), tensor_parallel.leave, _destroy_groups):
        try:
            end()
        except Exception as error:  # noqa: BLE001  raised below
            errors.append(error)
    gc.collect()
    if errors:
        for later in errors[1:]:
            errors[0].add_note(f"then: {type(later).__name__}: {later}")
        raise errors[0]


def metrics(stats: Mapping[str, Any]) -> dict[str, float]:
    """Flattens an executor's stats to numbers by dotted name; adds the memory of process and devices in bytes."""
    numbers = dict(_flatten("", stats))
    numbers["memory.resident_bytes"] = float(_resident_bytes())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # All devices, since the calling thread's current device may not be the model's.
        devices = range(torch.cuda.device_count())
        numbers["memory.device_allocated_bytes"] = float(sum(torch.cuda.memory_allocated(i) for i in devices))
        numbers["memory.device_reserved_bytes"] = float(sum(torch.cuda.memory_reserved(i) for i in devices))
    return numbers


def _flatten(prefix: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(i), item) for i, item in enumerate(value)]
    elif isinstance(value, int | float):
        return [(prefix, float(value))]
    else:
        return []
    return [number for key, item in items for number in _flatten(f"{prefix}.{key}" if prefix else key, item)]


def _resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()


def _destroy_groups() -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _stream_handlers(
    streams: Sequence[TextIO | None],
) -> list[tuple[logging.Logger, logging.StreamHandler[TextIO]]]:
    """The handlers that write to one of the streams, with their loggers, parents before children."""
    named = [logger for _, logger in sorted(logging.root.manager.loggerDict.items())]
    return [
        (logger, handler)
        for logger in (logging.root, *named)
        if isinstance(logger, logging.Logger)  # not a placeholder
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler) and any(handler.stream is stream for stream in streams)
    ]


def _reaches(logger: logging.Logger | None, handler: logging.Handler) -> bool:
    """Whether the handler gets the logger's records."""
    while logger is not None:
        if handler in logger.handlers:
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
