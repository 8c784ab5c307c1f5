"""A process that compiles grammars as engines do, so that one which crashes or swallows memory does
it here: python -m prism.engines.sglang.try_grammar.

A line of JSON on standard input asks: {"directory", "vocab_size", "kind", "text"}. A line answers:
{"error": what is wrong with the grammar, or ""}. The frontend that started it kills it when an
answer takes too long.
"""

from __future__ import annotations

import importlib.util
import json
import re
import resource
import sys
import threading
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from xgrammar import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarMatcher,
    TokenizerInfo,
    allocate_token_bitmask,
)

from prism.engines.sglang import vocabulary
from prism.engines.sglang.json_schemas import unkept
from prism.engines.sglang.known import package_folder
from prism.engines.sglang.parsers import WHITESPACE_MAX
from prism.process import die_with_parent

# Beyond what it holds with its libraries. Engines have room for more.
MEMORY_BYTES_MAX = 2 << 30
# Half of what a thread of an engine has, which compiles the same.
STACK_BYTES = 4 << 20
# Where in its sources XGrammar found an error, and when.
_PLACE = re.compile(r"^\[[0-9:]+\] \S+: ")


def main() -> None:
    die_with_parent()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES_MAX, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=_serve)
    worker.start()
    worker.join()


def _serve() -> None:
    for line in sys.stdin:
        print(json.dumps({"error": tried(json.loads(line))}), flush=True)


def tried(asked: dict[str, Any]) -> str:
    """What is wrong with the grammar; empty: nothing."""
    try:
        made, info = _compiler(asked["directory"], asked["vocab_size"])
        compiled = _compile(made, asked["kind"], asked["text"])
        mask = allocate_token_bitmask(1, info.vocab_size)
        if GrammarMatcher(compiled).fill_next_token_bitmask(mask) and not mask.any():
            return "no text matches it"
    except (RuntimeError, ValueError, RecursionError) as error:
        first = _PLACE.sub("", str(error).strip()).partition("\n")[0]
        return first or type(error).__name__
    except MemoryError:
        return "it takes too much memory"
    return ""


@lru_cache(maxsize=4)
def _compiler(directory: str, vocab_size: int) -> tuple[GrammarCompiler, TokenizerInfo]:
    tokenizer, ends = vocabulary.load(Path(directory))
    return vocabulary.compiler(tokenizer, vocab_size, ends)


def _compile(made: GrammarCompiler, kind: str, text: str) -> CompiledGrammar:
    if kind == "json":
        schema = json.loads(text)
        _validation().validate_xgrammar_json_schema(schema)
        compiled = made.compile_json_schema(text, max_whitespace_cnt=WHITESPACE_MAX)
        _refuse_unkept(schema)
        return compiled
    if kind == "regex":
        return made.compile_regex(text)
    if kind == "structural_tag":
        return made.compile_structural_tag(text)
    return made.compile_grammar(text)


def _refuse_unkept(schema: Any) -> None:
    """Of a schema that compiles: parts that nothing leads to may have any form. Raises
    ValueError."""
    for part, place in _validation()._iter_subschemas(schema):
        try:
            error = unkept(part, schema)
        except (AttributeError, TypeError):
            error = "this is no schema"
        if error:
            raise ValueError(f"{error} (at {place:.200})")


@lru_cache(maxsize=1)
def _validation() -> ModuleType:
    """SGLang's list of what XGrammar ignores in a schema: its file alone, since the package takes
    seconds to import."""
    path = package_folder("sglang") / "srt/constrained/json_schema_validation.py"
    spec = importlib.util.spec_from_file_location("prism._json_schema_validation", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
