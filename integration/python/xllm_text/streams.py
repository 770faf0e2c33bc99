"""Prepares stdin, stdout and stderr of the command line, which the caller may have closed, and names write errors."""

from __future__ import annotations

import io
import os
import sys


def open_closed_descriptors() -> bool:
    """Opens /dev/null for every closed descriptor of 0, 1 and 2; else the next pipe or file would get its number.

    Messages to a closed stderr are discarded. Returns whether stdout was open.
    """
    has_stdout = sys.stdout is not None
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # the lowest free number
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An answer may have characters that the locale's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    return has_stdout


def write_error(error: str) -> None:
    """Writes one line to stderr. Ignores a stderr that cannot be written."""
    try:
        sys.stderr.write(f"error: {' '.join(error.split())}\n")
        sys.stderr.flush()
    except OSError:
        discard_output()


def discard_output() -> None:
    """Redirects stdout and stderr to /dev/null: else the interpreter fails to flush their buffers when it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):  # often the same pipe
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
