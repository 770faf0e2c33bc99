"""`Worker` runs an `xllm_worker` process and speaks its JSON Lines protocol. Token ids only, no text."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

_MAX_LINE = 1 << 24  # characters of an event; the longest are stats
_MAX_SHOWN = 80
_STOP_TIMEOUT = 4.0  # seconds after SIGTERM; the worker needs up to 2
_END_TIMEOUT = 10.0  # seconds for the process to end after its pipes are closed


class WorkerError(RuntimeError):
    """The worker refused a request, or its process has ended."""


class Worker:
    """An `xllm_worker` process. It shares this process's stderr.

    Use it as a context manager: on exit the worker finishes its requests and ends. After an exception it gets SIGTERM,
    and SIGKILL when it runs on.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Starts the process; `command` is its path and flags. Raises `WorkerError` when it cannot be started."""
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
        except OSError as error:
            raise WorkerError(f"cannot start the worker {command[0]}: {error.strerror}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input = self._process.stdin
        self._output = self._process.stdout

    def ready(self) -> dict[str, Any]:
        """Waits until the model is loaded; returns its `ready` event, which has `model_type`, `dtype` and `device`."""
        event = self.read_event()
        if event.get("event") != "ready" or not {"model_type", "dtype", "device"} <= event.keys():
            raise _unknown(event)
        return event

    def send(self, message: Mapping[str, object]) -> None:
        """Sends one request or command."""
        try:
            self._input.write(json.dumps(message) + "\n")
            self._input.flush()
        except BrokenPipeError as error:
            raise self._gone() from error

    def read_event(self) -> dict[str, Any]:
        """Reads the next event. Raises `WorkerError` when the worker has ended or writes something else."""
        try:
            line = self._output.readline(_MAX_LINE)
        except UnicodeDecodeError as error:
            raise WorkerError("the worker wrote a line that is not UTF-8") from error
        if not line:
            raise self._gone()
        try:
            event = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WorkerError(f"the worker wrote a line that is not JSON: {_shown(line)}") from error
        if not isinstance(event, dict):
            raise WorkerError(f"the worker wrote a line that is no event: {_shown(line)}")
        return event

    def generate(self, token_ids: Sequence[int], max_tokens: int, deliver: Callable[[int], None]) -> str:
        """Runs one request, passes each token to `deliver` as it arrives, and returns the finish reason.

        Raises `WorkerError` when the request is refused.
        """
        self.send({"id": "0", "token_ids": list(token_ids), "max_tokens": max_tokens})
        while not (event := self.read_event()).get("finished"):
            try:
                if "error" in event:
                    raise WorkerError(event["error"]["message"])
                tokens = [int(token) for token in event["token_ids"]]
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise _unknown(event) from error
            for token in tokens:
                deliver(token)
        return str(event.get("finish_reason"))

    def close(self) -> int:
        """Closes the input, waits until all requests are finished, and returns the exit code."""
        # communicate() also reads the output, so that the worker cannot block on a full pipe.
        self._process.communicate()
        return self._process.returncode

    def _gone(self) -> WorkerError:
        try:
            code = self._process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            return WorkerError("the worker closed its stdin or stdout")
        if code < 0:
            return WorkerError(f"the worker was ended by {signal.Signals(-code).name}")
        return WorkerError(f"the worker ended with exit code {code}")

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self._stop()

    def _stop(self) -> None:
        """Ends the process if it runs, and closes the pipes."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        with contextlib.suppress(BrokenPipeError):  # a request that the worker did not read
            self._input.close()
        self._output.close()


def _unknown(event: Mapping[str, object]) -> WorkerError:
    return WorkerError(f"the worker wrote an unknown event: {_shown(json.dumps(event))}")


def _shown(line: str) -> str:
    text = line.rstrip("\n")
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "...")
