"""A model's vocabulary as XGrammar wants it: for engines, and to try grammars."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast
from xgrammar import CompiledGrammar, Grammar, GrammarCompiler, TokenizerInfo

from prism.engines.sglang.json_schemas import kept_patterns
from prism.engines.sglang.regexes import class_of, kept_ebnf, kept_regex
from prism.models.special_tokens import end_ids

COMPILE_THREADS = 2
CACHE_BYTES_MAX = 64 << 20  # of what a compiler keeps
# The rule that XGrammar makes of a character where a JSON string's length is bounded. It lets
# control characters stand as they are, which no JSON does, knows no escapes, and counts a sequence
# of bytes that is no UTF-8 as one character, which is shown as several.
_BOUNDED = re.compile(r'^(\w+) ::= \(\(\[\^\\"\\\\\\r\\n\]\)\)$', re.MULTILINE)
_UNESCAPED = class_of([(0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF)])
_OF_JSON = rf'({_UNESCAPED} | ("\\" [\"\\/bfnrt]))'
# Bounds up to which characters may be escaped. XGrammar computes masks ahead for a class that is
# repeated, and for an alternative that is written out as often. It tries every token at every step
# for an alternative that is repeated: 20 ms with 49,000 tokens.
ESCAPED_MAX = 64


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
    """XGrammar's, whose bounded strings are JSON, and which keeps to each class of characters. A
    regular expression that it would not keep to is an error, as for XGrammar any other one is."""

    def compile_json_schema(self, schema: Any, **options: Any) -> CompiledGrammar:
        schema = _with_kept_patterns(schema)
        text = mended(Grammar.from_json_schema(schema, **options))
        if text:
            return super().compile_grammar(text)
        return super().compile_json_schema(schema, **options)

    def compile_structural_tag(self, *tag: Any) -> CompiledGrammar:
        [given] = tag
        kept = _with_kept_patterns(given if isinstance(given, str) else given.model_dump_json())
        text = mended(Grammar.from_structural_tag(kept))
        return super().compile_grammar(text) if text else super().compile_structural_tag(kept)

    def compile_regex(self, regex: str) -> CompiledGrammar:
        return super().compile_regex(kept_regex(regex))

    def compile_grammar(self, *ebnf: Any, **options: Any) -> CompiledGrammar:
        return super().compile_grammar(*map(kept_ebnf, ebnf), **options)


def _with_kept_patterns(text: str) -> str:
    """Returns the JSON of a schema or a structural tag; one without such patterns as it is."""
    given = json.loads(text)
    kept = kept_patterns(given)
    return text if kept == given else json.dumps(kept, ensure_ascii=False)


def mended(grammar: Grammar) -> str:
    """Returns the grammar in EBNF with its bounded strings put right; empty if it has none."""
    text, found = _BOUNDED.subn(lambda rule: f"{rule[1]} ::= {_UNESCAPED}", str(grammar))
    if not found:
        return ""
    rules = {}

    def short(use: re.Match[str]) -> str:
        least, most = int(use[1]), int(use[2])
        if max(least, most) > ESCAPED_MAX:
            return use[0]
        name = f"characters_{least}_{'any' if most < 0 else most}"
        rules[name] = f"{name} ::= {_characters(least, most)}"
        return name

    names = "|".join(_BOUNDED.findall(str(grammar)))
    text = re.sub(rf"\b(?:{names})\{{(\d+), (-?\d+)\}}", short, text)
    return kept_ebnf("\n".join([text, *rules.values()]))


def _characters(least: int, most: int) -> str:
    """Returns EBNF for so many characters of a JSON string; at most -1 is any number of them."""
    rest = f"{_OF_JSON}*" if most < 0 else ""
    for place in range(max(least, most), 0, -1):
        rest = f"{_OF_JSON} {rest}"
        rest = rest if place <= least else f"({rest})?"
    return rest or '""'
