"""Process that compiles and matches grammars like an engine, so that a grammar that crashes or
takes all memory does so here: python -m prism.engines.sglang.grammars.try_grammar.

A request is a line of JSON on stdin: {"directory", "vocab_size", "kind", "text", "cpu_s_max"}. The
answer is a line on stdout: {"error": what is wrong with the grammar, or ""; "cpu_s": CPU time of
the trial}. The kernel ends the process with SIGPROF if a trial takes more than `cpu_s_max`.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from xgrammar import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarMatcher,
    TokenizerInfo,
    allocate_token_bitmask,
)

from prism.engines.sglang.grammars import vocabulary
from prism.engines.sglang.grammars.grammar_process import MATCH_CPU_S, cpu_limit
from prism.engines.sglang.grammars.json_schemas import unenforced
from prism.engines.sglang.grammars.parsers import WHITESPACE_MAX
from prism.models.weight_names import package_folder
from prism.process import die_with_parent

# In addition to the process with its libraries. Engines have more memory.
MEMORY_BYTES_MAX = 2 << 30
# Half the stack of an engine's thread that compiles the same grammar.
STACK_BYTES = 4 << 20
# Half the limit of an engine, since the model's actual output is not known here.
_MATCH_CPU_S = MATCH_CPU_S / 2
_WALK_TOKENS = 64
# Prefix of XGrammar's errors: time and position in its source code.
_ERROR_PREFIX = re.compile(r"^\[[0-9:]+\] \S+: ")


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # `cpu_limit`
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
        asked, began_s = json.loads(line), time.process_time()
        with cpu_limit(asked["cpu_s_max"]):
            error = grammar_error(asked)
        answer = {"error": error, "cpu_s": time.process_time() - began_s}
        print(json.dumps(answer), flush=True)


def grammar_error(asked: dict[str, Any]) -> str:
    """Returns what is wrong with the grammar, empty if nothing is."""
    try:
        made, info = _compiler(asked["directory"], asked["vocab_size"])
        compiled = _compile(made, asked["kind"], asked["text"])
        mask = allocate_token_bitmask(1, info.vocab_size)
        if GrammarMatcher(compiled).fill_next_token_bitmask(mask) and not mask.any():
            return "no text matches it"
        slowest_s = max(
            max(_walk(compiled, info, repeats), default=0.0) for repeats in (0.0, 0.5, 1.0)
        )
        if slowest_s > _MATCH_CPU_S:
            return f"it takes {1000 * slowest_s:.0f} ms of CPU time to match one token; simplify it"
    except (RuntimeError, ValueError, RecursionError) as error:
        first = _ERROR_PREFIX.sub("", str(error).strip()).partition("\n")[0]
        return first or type(error).__name__
    except MemoryError:
        return "it takes too much memory"
    return ""


def _walk(compiled: CompiledGrammar, info: TokenizerInfo, repeats: float) -> Iterator[float]:
    """Yields the CPU time in seconds of each token of a random output that the grammar allows.

    With probability `repeats` a token repeats the previous one, if that is allowed. A token after
    which only the end is allowed is replaced. Stops after the first token that takes too long.
    """
    draw, matcher = random.Random(0), GrammarMatcher(compiled)
    mask = allocate_token_bitmask(1, info.vocab_size)
    token, before = 0, np.zeros(0, bool)
    for _ in range(_WALK_TOKENS):
        began_s = time.process_time()
        matcher.fill_next_token_bitmask(mask)
        filled_s = time.process_time()
        allowed = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little").view(bool)
        allowed[matcher.stop_token_ids] = False
        if before.any() and not allowed.any():
            matcher.rollback(1)
            allowed, before[token] = before, False
        if not allowed.any():
            return
        if not allowed[token] or draw.random() >= repeats:
            token = int(draw.choice(np.flatnonzero(allowed)))
        accepts_s = time.process_time()
        matcher.accept_token(token)
        taken_s = time.process_time() - accepts_s + filled_s - began_s
        before = allowed
        yield taken_s
        if taken_s > _MATCH_CPU_S:
            return


@lru_cache(maxsize=4)
def _compiler(directory: str, vocab_size: int) -> tuple[GrammarCompiler, TokenizerInfo]:
    tokenizer, ends = vocabulary.load(Path(directory))
    return vocabulary.compiler(tokenizer, vocab_size, ends)


def _compile(made: GrammarCompiler, kind: str, text: str) -> CompiledGrammar:
    if kind == "json":
        schema = json.loads(text)
        _validation().validate_xgrammar_json_schema(schema)
        compiled = made.compile_json_schema(text, max_whitespace_cnt=WHITESPACE_MAX)
        _reject_unenforced(schema)
        return compiled
    if kind == "regex":
        return made.compile_regex(text)
    if kind == "structural_tag":
        return made.compile_structural_tag(text)
    return made.compile_grammar(text)


def _reject_unenforced(schema: Any) -> None:
    """Raises ValueError for a part of the schema that XGrammar does not enforce. The schema
    compiles, but unreachable parts may have any form."""
    for part, place in _validation()._iter_subschemas(schema):
        try:
            error = unenforced(part, schema)
        except (AttributeError, TypeError):
            error = "this is not a schema"
        if error:
            raise ValueError(f"{error} (at {place:.200})")


@lru_cache(maxsize=1)
def _validation() -> ModuleType:
    """Imports SGLang's list of schema parts that XGrammar ignores. Imports its file alone, since
    the package takes seconds to import."""
    path = package_folder("sglang") / "srt/constrained/json_schema_validation.py"
    spec = importlib.util.spec_from_file_location("prism._json_schema_validation", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
