"""Token ids to text, a few at a time."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# Tokens before the first generated one that decide whether its leading space is kept.
_CONTEXT_TOKENS = 5
_INCOMPLETE = "\ufffd"


class Detokenizer:
    """One output's text. Special tokens are left out where `skip_special_tokens`; bytes of an
    incomplete character wait for the rest. The pieces joined equal decode(prompt + ids) without the
    prompt's text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        if self._decode(self._ids).endswith(_INCOMPLETE):
            self._ids = []
        self._stream = DecodeStream(ids=self._ids, skip_special_tokens=self._skip)
        self._shown = len(self._ids)  # the text of so many is out

    def push(self, token_id: int) -> str:
        """Text that `token_id` completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        try:
            piece: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            # The stream has no error type of its own. It says this where a decoder changes text
            # that is already out; from here on the text goes on with a fresh stream.
            if "Invalid prefix" not in str(error):
                raise
            self._stream = DecodeStream(ids=[], skip_special_tokens=self._skip)
            piece = self._stream.step(self._tokenizer, token_id)
        if piece is None:
            return ""
        self._shown = len(self._ids)
        return piece

    def flush(self) -> str:
        """Text of what still waits, incomplete characters as U+FFFD. Call once, at the end."""
        if self._shown == len(self._ids):
            return ""
        start = max(0, self._shown - _CONTEXT_TOKENS)
        before = self._decode(self._ids[start : self._shown])
        return self._decode(self._ids[start:])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip))
