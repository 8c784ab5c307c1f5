"""A model's vocabulary as XGrammar wants it: for engines, and to try grammars."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast
from xgrammar import CompiledGrammar, Grammar, GrammarCompiler, TokenizerInfo

from prism.models.special_tokens import end_ids

COMPILE_THREADS = 2
CACHE_BYTES_MAX = 64 << 20  # of what a compiler keeps
# The rule that XGrammar makes of a character where a JSON string's length is bounded. It lets
# control characters stand as they are, which no JSON does, knows no escapes, and counts a sequence
# of bytes that is no UTF-8 as one character, which is shown as several.
_BOUNDED = re.compile(r'^(\w+ ::= )\(\(\[\^\\"\\\\\\r\\n\]\)\)$', re.MULTILINE)
# Of a range over several lengths in UTF-8 it would take overlong sequences, too.
_ONE_BYTE, _TWO, _THREE = r" !#-\[\]-\x7F", r"\x80-\u07FF", r"\u0800-\uD7FF\uE000-\uFFFF"
_FOUR = r"\U00010000-\U0010FFFF"
_OF_JSON = rf'([{_ONE_BYTE}{_TWO}{_THREE}{_FOUR}] | ("\\" [\"\\/bfnrt]))'


def load(directory: Path) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """The tokenizer, and the tokens that end an output. Raises ValueError where there are none."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    _, ends = end_ids(directory, tokenizer.backend_tokenizer)
    if not ends:
        raise ValueError("the model's files name no end-of-sequence token, which grammars need")
    return tokenizer, list(ends)


def compiler(
    tokenizer: PreTrainedTokenizerFast, vocab_size: int, ends: list[int]
) -> tuple[GrammarCompiler, TokenizerInfo]:
    """Takes no more threads and memory than an engine can spare."""
    info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=ends)
    made = JsonCompiler(info, max_threads=COMPILE_THREADS, cache_limit_bytes=CACHE_BYTES_MAX)
    return made, info


class JsonCompiler(GrammarCompiler):
    """XGrammar's, whose bounded strings are JSON."""

    def compile_json_schema(self, schema: Any, **options: Any) -> CompiledGrammar:
        text = mended(Grammar.from_json_schema(schema, **options))
        return (
            self.compile_grammar(text) if text else super().compile_json_schema(schema, **options)
        )

    def compile_structural_tag(self, *tag: Any) -> CompiledGrammar:
        text = mended(Grammar.from_structural_tag(*tag))
        return self.compile_grammar(text) if text else super().compile_structural_tag(*tag)


def mended(grammar: Grammar) -> str:
    """The grammar in EBNF with its bounded strings put right; empty: it has none."""
    text, found = _BOUNDED.subn(lambda rule: rule[1] + _OF_JSON, str(grammar))
    return text if found else ""
