"""Decodes a stream of tokens to text, only whole characters at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_NUM_CONTEXT = 6


class Decoder(Protocol):
    """Decodes tokens, for example `tokenizers.Tokenizer`."""

    def decode(self, ids: Sequence[int], /) -> str:
        """The text of tokens; special tokens have none."""


class IncrementalDetokenizer:
    """Turns tokens into text one by one.

    A character may take several tokens, and some decoders treat the first token of a text differently. So each token is
    decoded together with the tokens before it, and incomplete characters are held back. The pieces join to the text of
    all tokens. Special tokens have no text.
    """

    def __init__(self, tokenizer: Decoder, prompt_ids: Sequence[int]) -> None:
        """`prompt_ids`: the tokens that the answer continues; the last few are context for its first token."""
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-_NUM_CONTEXT:])
        self._begin = 0  # ids before this index are not decoded any more
        self._returned = len(self._ids)  # the text of the ids before this index was returned

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes. May be empty."""
        self._ids.append(token_id)
        text = self._pending_text()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        self._begin, self._returned = self._returned, len(self._ids)
        return text

    def flush(self) -> str:
        """Returns the remaining text, with a replacement character for an incomplete character."""
        text = self._pending_text()
        self._begin = self._returned = len(self._ids)
        return text

    def _pending_text(self) -> str:
        returned = self._tokenizer.decode(self._ids[self._begin : self._returned])
        return self._tokenizer.decode(self._ids[self._begin :])[len(returned) :]
