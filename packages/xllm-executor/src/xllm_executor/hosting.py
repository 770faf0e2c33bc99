"""What the bridge asks of Python about the process: where output goes, health figures, and the end.

Owns the redirection of logging, warnings and printed lines, and the order of shutdown. Called by the C++ bridge; a pure
Python host needs none of it.
"""

from __future__ import annotations

import gc
import logging
import resource
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from . import tensor_parallel

LogSink = Callable[[int, str, str], None]
"""(level, logger, message)."""

_EXECUTORS: weakref.WeakSet[Any] = weakref.WeakSet()


class _SinkHandler(logging.Handler):
    """Hands log records to the host, formatted without level and name, which go beside them."""

    def __init__(self, sink: LogSink) -> None:
        super().__init__()
        self._sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        self._sink(record.levelno, record.name, self.format(record))


class _SinkStream:
    """A text stream whose lines go to the host."""

    encoding = "utf-8"

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
        """Lines go out when they are complete."""

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True


def redirect_output(sink: LogSink | None) -> None:
    """Sends log records, warnings and printed lines to the sink; without one, all of them to stderr.

    stdout is the host's: nothing that Python prints goes there.
    """
    if sink is None:
        sys.stdout = sys.stderr
        return
    root = logging.getLogger()
    root.addHandler(_SinkHandler(sink))
    logging.captureWarnings(True)
    sys.stdout = _as_text_stream(_SinkStream(sink, logging.INFO, "stdout"))
    sys.stderr = _as_text_stream(_SinkStream(sink, logging.WARNING, "stderr"))


def register_executor(executor: Any) -> None:
    """Makes `shut_down` know an executor; holds it weakly."""
    _EXECUTORS.add(executor)


def shut_down() -> None:
    """Frees what Python holds, in the order that devices need: graphs, then process groups, then objects."""
    for executor in list(_EXECUTORS):
        executor.shutdown()
    tensor_parallel.leave()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()


def metrics(stats: Mapping[str, Any]) -> dict[str, float]:
    """An executor's stats as plain numbers under dotted names, and memory of process and devices in bytes."""
    numbers = dict(_flatten("", stats))
    numbers["memory.resident_bytes"] = float(_resident_bytes())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # Of all devices: the thread that asks need not have the model's as its current one.
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


def _as_text_stream(stream: _SinkStream) -> TextIO:
    """print and tqdm use write, flush, isatty and encoding of a stream, and nothing else."""
    text: Any = stream
    result: TextIO = text
    return result
