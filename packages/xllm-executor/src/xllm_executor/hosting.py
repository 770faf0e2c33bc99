"""Process-wide services of the C++ bridge: redirection of log records, and the order of shutdown.

A pure Python host needs none of it.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Sequence
from typing import TextIO

import torch

from . import tensor_parallel
from .executor import ModelExecutor  # when the bridge starts: a broken environment fails there, not at the first model
from .streams import LogSink, encodable

_EXECUTORS: weakref.WeakSet[ModelExecutor] = weakref.WeakSet()


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


def redirect_logging(sink: LogSink | None, replaced: Sequence[TextIO | None] = ()) -> None:
    """Sends log records and warnings to the sink, or to stderr without one. Call `redirect_streams` before.

    Args:
        replaced: what `redirect_streams` returned. Handlers that write to these streams, or to the present or original
            ones, are redirected too.
    """
    if sink is None:
        for _, writer in _stream_handlers((sys.__stdout__, *replaced[:1])):
            writer.setStream(sys.stderr)
        return

    def send(level: int, name: str, text: str) -> None:
        sink(level, encodable(name), encodable(text))

    handler = _SinkHandler(send)
    logging.getLogger().addHandler(handler)
    # Libraries imported earlier have handlers on the streams, and torch's loggers do not propagate.
    for logger, writer in _stream_handlers((sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__, *replaced)):
        logger.removeHandler(writer)
        if not _reaches(logger, handler):
            logger.addHandler(handler)
    logging.captureWarnings(True)


def register_executor(executor: ModelExecutor) -> None:
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
