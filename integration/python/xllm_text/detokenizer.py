"""`IncrementalDetokenizer`: text out of a growing list of tokens, whole characters only."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_NUM_CONTEXT = 6


class IncrementalDetokenizer:
    """Turns tokens into text one by one.

    A character may be spread over several tokens, and some decoders treat a text's first token differently. So each
    token is decoded together with those before it, and text is given out only when it does not end within a character.
    The pieces together are the text of all tokens; special tokens have none.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        """`prompt_ids`: the tokens that the answer continues; the last few are context for its first token."""
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-_NUM_CONTEXT:])
        self._begin = 0  # ids before it are not needed any more
        self._given = len(self._ids)  # the text of the ids before it has been given out

    def push(self, token_id: int) -> str:
        """The text that this token completes; often its own, at times none."""
        self._ids.append(token_id)
        text = self._pending_text()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        self._begin, self._given = self._given, len(self._ids)
        return text

    def flush(self) -> str:
        """What is left at the end: the replacement character for an incomplete one."""
        text = self._pending_text()
        self._begin = self._given = len(self._ids)
        return text

    def _pending_text(self) -> str:
        given = self._tokenizer.decode(self._ids[self._begin : self._given])
        return self._tokenizer.decode(self._ids[self._begin :])[len(given) :]
