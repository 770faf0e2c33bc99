"""Implements `python -m xllm_text "prompt"` and `python -m xllm_text fetch`. Only results go to stdout."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .chat import render_chat
from .detokenizer import IncrementalDetokenizer
from .fetch import DEFAULT_DIR, FetchError, fetch
from .stop_signals import Stopped, StopSignals
from .streams import discard_output, open_closed_descriptors, write_error
from .tokenizer import TextTokenizer
from .worker import Worker, WorkerError

_NO_READER = 141  # exit code that a shell reports for SIGPIPE


def main(args: Sequence[str]) -> int:
    """Runs one command and returns its exit code.

    0 success, 1 failure, 2 wrong arguments, 141 stdout was closed, 128 + number for SIGINT, SIGTERM or SIGHUP.
    """
    if not open_closed_descriptors():
        write_error("stdout is closed")
        return 1
    try:
        try:
            _run(args, StopSignals())
        finally:
            sys.stdout.flush()  # argparse leaves with a SystemExit and the help in the buffer
    except BrokenPipeError:
        discard_output()
        return _NO_READER
    except OSError as error:
        name = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        write_error(f"{name}{error.strerror or error}")
        discard_output()  # what cannot be written stays in the buffer
        return 1
    except (FetchError, WorkerError, ValueError) as error:
        write_error(str(error))
        return 1
    except Stopped as stopped:
        sys.stderr.write(f"{stopped}\n")
        return 128 + stopped.number
    return 0


def _run(args: Sequence[str], signals: StopSignals) -> None:
    if args and args[0] == "fetch":
        path = fetch(_fetch_parser().parse_args(args[1:]).out)
        sys.stdout.buffer.write(os.fsencode(path) + b"\n")  # a path need not be text
    else:
        _answer(_answer_parser().parse_args(args), signals)


def _fetch_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m xllm_text fetch",
        description="Fetch SmolLM2-135M-Instruct, convert it to a checkpoint directory, and print its path.",
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_DIR, help="checkpoint directory (default: %(default)s)")
    return parser


def _answer_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m xllm_text",
        description="Let a model answer a prompt. `python -m xllm_text fetch` fetches a model to try.",
    )
    parser.add_argument("prompt", help="a user's message; with --raw, the text to continue")
    parser.add_argument(
        "--worker",
        default=os.environ.get("XLLM_WORKER"),
        help="the xllm_worker program (default: the environment variable XLLM_WORKER)",
    )
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory with tokenizer.json")
    parser.add_argument("--max-tokens", type=_positive, default=128, help="longest answer (default: %(default)s)")
    parser.add_argument("--raw", action="store_true", help="continue the prompt, without the model's chat template")
    parser.add_argument(
        "--worker-flag",
        action="append",
        default=[],
        metavar="FLAG",
        help="a flag for the worker, as in --worker-flag=--dtype=float32; may be repeated",
    )
    return parser


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not an integer of at least 1")
    return number


def _answer(options: argparse.Namespace, signals: StopSignals) -> None:
    if not options.worker:
        raise ValueError("no worker: pass --worker or set XLLM_WORKER to the xllm_worker program")
    tokenizer = TextTokenizer(options.model)
    prompt_ids = _encode(tokenizer, options)
    sys.stderr.write("loading the model ...\n")
    with contextlib.ExitStack() as stack:
        with signals.deferred():
            command = [options.worker, f"--model={options.model}", *options.worker_flag]
            worker = stack.enter_context(Worker(command))
        info = worker.ready()
        sys.stderr.write(f"{info['model_type']}, {info['dtype']} on {info['device']}\n")
        _stream(worker, tokenizer, prompt_ids, options.max_tokens)


def _encode(tokenizer: TextTokenizer, options: argparse.Namespace) -> list[int]:
    try:
        options.prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError("the prompt is not valid UTF-8") from error
    if not options.prompt:
        raise ValueError("the prompt is empty")
    chat = None if options.raw else render_chat(options.model, options.prompt)
    if chat is None and not options.raw:
        sys.stderr.write("the model has no chat template; it continues the prompt\n")
    # The template's text has the special tokens already.
    ids = tokenizer.encode(options.prompt if chat is None else chat, add_special_tokens=chat is None)
    if not ids:
        raise ValueError("the prompt has no tokens")
    return ids


def _stream(worker: Worker, tokenizer: TextTokenizer, prompt_ids: list[int], max_tokens: int) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
    begin = time.perf_counter()
    times = []
    has_text = False

    def write(token: int) -> None:
        nonlocal has_text
        times.append(time.perf_counter())
        text = detokenizer.push(token)
        has_text = has_text or bool(text.strip())
        sys.stdout.write(text)
        sys.stdout.flush()

    finish_reason = worker.generate(prompt_ids, max_tokens, write)
    rest = detokenizer.flush()
    sys.stdout.write(rest + "\n")
    sys.stdout.flush()
    if finish_reason == "length":
        reached = (
            f"--max-tokens {max_tokens}" if len(times) >= max_tokens else "the largest length that the worker serves"
        )
        sys.stderr.write(f"the answer is cut: it reached {reached}\n")
    if not has_text and not rest.strip():
        sys.stderr.write("the answer is empty\n")
    if times:
        sys.stderr.write(f"{_speed(begin, times)}\n")


def _speed(begin: float, times: Sequence[float]) -> str:
    """Time to the first token, and tokens per second after it."""
    summary = f"{len(times)} tokens, the first after {times[0] - begin:.2f} s"
    if len(times) > 1 and times[-1] > times[0]:
        summary += f", then {(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s"
    return summary
