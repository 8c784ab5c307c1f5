"""A model's vocabulary and grammar compiler for XGrammar, in engines and in trials of grammars."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast
from xgrammar import CompiledGrammar, Grammar, GrammarCompiler, TokenizerInfo

from prism.engines.sglang.grammars.json_schemas import rewrite_patterns
from prism.engines.sglang.grammars.regexes import class_of, rewrite_ebnf, rewrite_regex
from prism.models.special_tokens import end_ids

COMPILE_THREADS = 2
CACHE_BYTES_MAX = 64 << 20  # of a compiler
# XGrammar's rule for a character of a JSON string with a bounded length. The rule is wrong: it
# allows unescaped control characters, which JSON does not, rejects escapes, and counts invalid
# UTF-8 as one character, which decodes to several.
_BOUNDED = re.compile(r'^(\w+) ::= \(\(\[\^\\"\\\\\\r\\n\]\)\)$', re.MULTILINE)
_UNESCAPED = class_of([(0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF)])
_OF_JSON = rf'({_UNESCAPED} | ("\\" [\"\\/bfnrt]))'
# Largest bound of a string's length with which its characters may be escaped. XGrammar computes
# masks in advance for a repeated class and for alternatives that are written out. For a repeated
# alternative it tries every token at every step, which takes 20 ms with 49,000 tokens.
ESCAPED_MAX = 64


def load(directory: Path) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """Returns the tokenizer and the tokens that end an output. Raises ValueError if the model has
    no such token."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    _, ends = end_ids(directory, tokenizer.backend_tokenizer)
    if not ends:
        raise ValueError("the model's files name no end-of-sequence token, which grammars need")
    return tokenizer, list(ends)


def compiler(
    tokenizer: PreTrainedTokenizerFast, vocab_size: int, ends: list[int]
) -> tuple[GrammarCompiler, TokenizerInfo]:
    """Returns a compiler, with threads and memory bounded for use in an engine, and its
    vocabulary."""
    info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=ends)
    made = JsonCompiler(info, max_threads=COMPILE_THREADS, cache_limit_bytes=CACHE_BYTES_MAX)
    return made, info


class JsonCompiler(GrammarCompiler):
    """XGrammar's compiler with correct bounded JSON strings and character classes. Raises
    RuntimeError, like XGrammar, for a regular expression that XGrammar would not enforce."""

    def compile_json_schema(self, schema: Any, **options: Any) -> CompiledGrammar:
        schema = _with_rewritten_patterns(schema)
        text = with_json_strings(Grammar.from_json_schema(schema, **options))
        if text:
            return super().compile_grammar(text)
        return super().compile_json_schema(schema, **options)

    def compile_structural_tag(self, *tag: Any) -> CompiledGrammar:
        [given] = tag
        tag_text = given if isinstance(given, str) else given.model_dump_json()
        tag_text = _with_rewritten_patterns(tag_text)
        text = with_json_strings(Grammar.from_structural_tag(tag_text))
        return super().compile_grammar(text) if text else super().compile_structural_tag(tag_text)

    def compile_regex(self, regex: str) -> CompiledGrammar:
        return super().compile_regex(rewrite_regex(regex))

    def compile_grammar(self, *ebnf: Any, **options: Any) -> CompiledGrammar:
        return super().compile_grammar(*map(rewrite_ebnf, ebnf), **options)


def _with_rewritten_patterns(text: str) -> str:
    """Returns the JSON of a schema or structural tag with rewritten patterns; without changes it
    returns `text` itself."""
    given = json.loads(text)
    rewritten = rewrite_patterns(given)
    return text if rewritten == given else json.dumps(rewritten, ensure_ascii=False)


def with_json_strings(grammar: Grammar) -> str:
    """Returns the grammar in EBNF with correct bounded JSON strings; empty if it has no bounded
    strings."""
    text, found = _BOUNDED.subn(lambda rule: f"{rule[1]} ::= {_UNESCAPED}", str(grammar))
    if not found:
        return ""
    rules = {}

    def replace_use(use: re.Match[str]) -> str:
        least, most = int(use[1]), int(use[2])
        if max(least, most) > ESCAPED_MAX:
            return use[0]
        name = f"characters_{least}_{'any' if most < 0 else most}"
        rules[name] = f"{name} ::= {_characters(least, most)}"
        return name

    names = "|".join(_BOUNDED.findall(str(grammar)))
    text = re.sub(rf"\b(?:{names})\{{(\d+), (-?\d+)\}}", replace_use, text)
    return rewrite_ebnf("\n".join([text, *rules.values()]))


def _characters(least: int, most: int) -> str:
    """Returns EBNF for `least` to `most` characters of a JSON string; -1 means no upper bound."""
    rest = f"{_OF_JSON}*" if most < 0 else ""
    for place in range(max(least, most), 0, -1):
        rest = f"{_OF_JSON} {rest}"
        rest = rest if place <= least else f"({rest})?"
    return rest or '""'
