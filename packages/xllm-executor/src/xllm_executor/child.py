"""Runs a command that may fail in any way, and describes its failure in one line."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence

_TIMEOUT = 120.0  # seconds; the first import of torch from a cold disk takes tens of them


def run_child(command: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[str, str]:
    """(stdout, fault) of the command; the fault is empty after exit code 0."""
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            check=False,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return "", f"no result after {_TIMEOUT:.0f} s"
    except OSError as error:
        return "", error.strerror or str(error)
    if result.returncode == 0:
        return result.stdout, ""
    if result.returncode < 0:
        number = -result.returncode
        names = {int(known): known.name for known in signal.Signals}  # without most of the real-time signals
        return result.stdout, f"ended by {names.get(number, f'signal {number}')}"
    # The last line of a traceback is the exception; a compiler's first error line is the cause of the others.
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line]
    return result.stdout, (errors or lines[-1:] or [f"exit code {result.returncode}"])[0]
