"""Outputs that must match a grammar: SGLang's grammar manager, with a tokenizer of its own.

SGLang runs here without a tokenizer. A model's first grammar has one loaded, in the thread that
compiles grammars; requests wait for theirs beside the queue, and the others go on.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any

from sglang.srt.constrained.base_grammar_backend import (
    BaseGrammarBackend,
    BaseGrammarObject,
    InvalidGrammarObject,
)
from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar, XGrammarGrammarBackend
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

from prism.engines.sglang import vocabulary
from prism.engines.sglang.parsers import WHITESPACE_MAX

CACHED_MAX = 32  # compiled grammars of a model
# SGLang looks whether grammars are ready for so long in each step.
_POLL_S = 0.001
_TIMED_OUT = "Grammar preprocessing timed out"


class Grammars(GrammarManager):  # type: ignore[misc]
    """Thread rule: the engine's thread."""

    SGLANG_GRAMMAR_POLL_INTERVAL: float  # s
    SGLANG_GRAMMAR_MAX_POLL_ITERATIONS: int

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        # It gives a grammar up after so many looks: in the same time as ever.
        wait_s = self.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS * self.SGLANG_GRAMMAR_POLL_INTERVAL
        self.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS = round(wait_s / _POLL_S)
        self.SGLANG_GRAMMAR_POLL_INTERVAL = _POLL_S
        model = scheduler.model_config
        self.grammar_backend = _LazyBackend(Path(model.model_path), int(model.vocab_size))

    def get_ready_grammar_requests(self) -> list[Req]:
        ready: list[Req] = super().get_ready_grammar_requests()
        for req in ready:
            _excuse(req)
            catch_up(req)
        return ready


def _excuse(req: Req) -> None:
    """It is not the request's fault where other grammars take the thread's time."""
    ended = req.to_finish
    if isinstance(ended, FINISH_ABORT) and ended.message.startswith(_TIMED_OUT):
        text = "its grammar could not be compiled in time"
        req.to_finish = FINISH_ABORT(text, HTTPStatus.SERVICE_UNAVAILABLE)


def catch_up(req: Req) -> None:
    """A request that comes with output: its grammar takes that first."""
    if not isinstance(req.grammar, BaseGrammarObject):
        return
    try:
        for token_id in req.output_ids:
            req.grammar.accept_token(token_id)
    except ValueError:
        req.set_finish_with_abort("the output so far does not match the grammar")


class _LazyBackend(BaseGrammarBackend):  # type: ignore[misc]
    """XGrammar, from the first grammar on."""

    def __init__(self, directory: Path, vocab_size: int) -> None:
        super().__init__()
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._directory, self._vocab_size = directory, vocab_size
        self._backend: XGrammarGrammarBackend | None = None

    def _init_value_dispatch(self, key: tuple[str, str], require_reasoning: bool) -> Any:
        if self._backend is None:
            self._backend = _xgrammar(self._directory, self._vocab_size)
        made = self._backend._init_value_dispatch(key, require_reasoning)
        if isinstance(made, XGrammarGrammar):
            made.key_string = ""  # it would be in logs
        return made

    def set_cache(self, key: tuple[str, str], value: BaseGrammarObject) -> None:
        if isinstance(value, InvalidGrammarObject) and value.error_message.startswith(_TIMED_OUT):
            return
        while len(self.cache) >= CACHED_MAX:
            del self.cache[next(iter(self.cache))]
        super().set_cache(key, value)


def _xgrammar(directory: Path, vocab_size: int) -> XGrammarGrammarBackend:
    tokenizer, ends = vocabulary.load(directory)
    backend = XGrammarGrammarBackend(tokenizer, vocab_size, ends, max_whitespace_cnt=WHITESPACE_MAX)
    backend.grammar_compiler, _ = vocabulary.compiler(tokenizer, vocab_size, ends)
    return backend
