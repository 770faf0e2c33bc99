"""Loads a checkpoint's tokenizer.json, encodes prompts and decodes tokens. Every fault of the file is a ValueError."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

_STDERR = 2


class TextTokenizer:
    """The tokenizer of a checkpoint, without the truncation and padding that tokenizer.json may set for training."""

    def __init__(self, model_dir: Path) -> None:
        """Reads `model_dir`/tokenizer.json. Raises ValueError when there is none or it is not a tokenizer."""
        self._path = model_dir / "tokenizer.json"
        if not self._path.is_file():
            raise ValueError(f"{model_dir} has no tokenizer.json")
        content = self._path.read_bytes()  # the library itself opens only paths that are UTF-8
        with self._faults_named("is not a tokenizer"):
            self._tokenizer = Tokenizer.from_str(content.decode())
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The tokens of `text`. Raises ValueError when the tokenizer fails, as without a token for unknown text."""
        with self._faults_named("cannot encode the prompt"):
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens; special tokens have none. Raises ValueError when the tokenizer fails."""
        with self._faults_named("cannot decode the answer"):
            return str(self._tokenizer.decode(ids))

    @contextlib.contextmanager
    def _faults_named(self, fault: str) -> Iterator[None]:
        try:
            with _without_panic_messages():
                yield
        except BaseException as error:
            # tokenizers raises plain Exception, and for a Rust panic a BaseException that no module exports.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            reason = " ".join(str(error).split())
            raise ValueError(f"{self._path} {fault}: {reason}") from error


@contextlib.contextmanager
def _without_panic_messages() -> Iterator[None]:
    """Redirects descriptor 2 to /dev/null: a Rust panic writes a backtrace there before it becomes an exception."""
    saved = os.dup(_STDERR)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, _STDERR)
        yield
    finally:
        os.dup2(saved, _STDERR)
        os.close(saved)
        os.close(nowhere)
