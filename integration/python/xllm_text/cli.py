"""Implements `python -m xllm_text "prompt"` and `python -m xllm_text fetch`. Only results go to stdout."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from .chat import render_chat
from .detokenizer import IncrementalDetokenizer
from .fetch import DEFAULT_DIR, FetchError, fetch
from .worker import Worker, WorkerError

_INTERRUPTED = 130
_NO_READER = 141  # exit code that a shell reports for SIGPIPE


def main(args: Sequence[str]) -> int:
    """Runs one command and returns its exit code.

    0 success, 1 failure, 2 wrong arguments, 130 interrupted, 141 stdout was closed.
    """
    try:
        if args and args[0] == "fetch":
            options = _fetch_parser().parse_args(args[1:])
            sys.stdout.write(f"{fetch(options.out)}\n")
        else:
            _answer(_answer_parser().parse_args(args))
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return _NO_READER
    except (FetchError, WorkerError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return _INTERRUPTED
    return 0


def _discard_output() -> None:
    """Redirects stdout and stderr to /dev/null: else the interpreter fails to flush their buffers when it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):  # often the same pipe
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


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
        description="Let a model continue a prompt. `python -m xllm_text fetch` fetches a model to try.",
    )
    parser.add_argument("prompt", help="the text to continue")
    parser.add_argument(
        "--worker",
        default=os.environ.get("XLLM_WORKER"),
        help="the xllm_worker program (default: the environment variable XLLM_WORKER)",
    )
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory with tokenizer.json")
    parser.add_argument("--max-tokens", type=_positive, default=128, help="longest answer (default: %(default)s)")
    parser.add_argument("--chat", action="store_true", help="format the prompt with the model's chat template")
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


def _answer(options: argparse.Namespace) -> None:
    if not options.worker:
        raise ValueError("no worker: pass --worker or set XLLM_WORKER to the xllm_worker program")
    tokenizer = _load_tokenizer(options.model)
    text = render_chat(options.model, options.prompt) if options.chat else options.prompt
    prompt_ids = tokenizer.encode(text, add_special_tokens=not options.chat).ids
    if not prompt_ids:
        raise ValueError("the prompt is empty")
    sys.stderr.write("loading the model ...\n")
    with Worker([options.worker, f"--model={options.model}", *options.worker_flag]) as worker:
        info = worker.ready()
        sys.stderr.write(f"{info['model_type']}, {info['dtype']} on {info['device']}\n")
        _stream(worker, tokenizer, prompt_ids, options.max_tokens)


def _load_tokenizer(model_dir: Path) -> Tokenizer:
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{model_dir} has no tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer: {error}") from error


def _stream(worker: Worker, tokenizer: Tokenizer, prompt_ids: list[int], max_tokens: int) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
    begin = time.perf_counter()
    times = []
    for token in worker.generate(prompt_ids, max_tokens):
        times.append(time.perf_counter())
        sys.stdout.write(detokenizer.push(token))
        sys.stdout.flush()
    sys.stdout.write(detokenizer.flush() + "\n")
    sys.stdout.flush()
    sys.stderr.write(f"{_speed(begin, times)}\n")


def _speed(begin: float, times: Sequence[float]) -> str:
    """Time to the first token, and tokens per second after it."""
    summary = f"{len(times)} tokens, the first after {times[0] - begin:.2f} s"
    if len(times) > 1 and times[-1] > times[0]:
        summary += f", then {(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s"
    return summary
