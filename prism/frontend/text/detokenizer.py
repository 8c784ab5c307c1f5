"""Incremental detokenization."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# Tokens before the first generated one that decide whether its leading space is kept.
_CONTEXT_TOKENS = 5
_INCOMPLETE = "\ufffd"
# Tokens without text after which they are flushed. A character has at most four tokens.
_WAITING_MAX = 16


class Detokenizer:
    """Incremental detokenizer of one output. Bytes of an incomplete character are held back until
    the rest arrives. The joined pieces equal decode(prompt + ids) without the prompt's text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int]
        self._shown: int  # number of `_ids` whose text was returned
        self._stream: DecodeStream
        self._begin(list(prompt_ids[-_CONTEXT_TOKENS:]))

    def push(self, token_id: int) -> str:
        """Returns the text that `token_id` completes, empty while a character is incomplete."""
        self._ids.append(token_id)
        try:
            piece: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            # The stream does not have an error type. It raises this if a decoder changes text that
            # was already returned; the text continues with a fresh stream.
            if "Invalid prefix" not in str(error):
                raise
            self._stream = DecodeStream(ids=[], skip_special_tokens=self._skip)
            piece = self._stream.step(self._tokenizer, token_id)
        if piece is None:
            return self._overdue() if len(self._ids) - self._shown >= _WAITING_MAX else ""
        self._ids = self._ids[-_CONTEXT_TOKENS:]
        self._shown = len(self._ids)
        return piece

    def flush(self) -> str:
        """Returns the text that is held back, with incomplete characters as U+FFFD. Call once, at
        the end."""
        return self._text(self._ids)

    def _begin(self, context: list[int]) -> None:
        """Starts a stream after the text of the ids `context`."""
        self._ids = [] if self._decode(context).endswith(_INCOMPLETE) else context
        self._stream = DecodeStream(ids=self._ids, skip_special_tokens=self._skip)
        self._shown = len(self._ids)

    def _overdue(self) -> str:
        """Returns the text of held tokens that no later token can complete, since the stream would
        decode them again with each token. A possible start of a character stays held back."""
        ids, whole = self._ids, self._text(self._ids)
        if not whole:
            self._begin(ids[: self._shown])
            return ""
        # A cut within a character leaves an incomplete one in both parts.
        cuts = range(len(ids) - 3, len(ids))
        exact = (at for at in cuts if self._text(ids[:at]) + self._decode(ids[at:]) == whole)
        cut = next(exact, len(ids))
        text = self._text(ids[:cut])
        self._begin(ids[max(0, cut - _CONTEXT_TOKENS) : cut])
        return text + "".join(self.push(token_id) for token_id in ids[cut:])

    def _text(self, ids: list[int]) -> str:
        """Returns the text of `ids` without that of the tokens already shown."""
        before = self._decode(self._ids[: self._shown])
        return self._decode(ids)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip))
