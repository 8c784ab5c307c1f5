"""Structured output: the grammar of a request, and a trial whether it compiles."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import sys
import time
from collections import Counter, OrderedDict
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from prism.config.checks.adapters import grammars_module
from prism.errors import RequestError
from prism.frontend.child_process import exchange
from prism.frontend.http.error_bodies import OverloadedError, UnavailableError, bad_request
from prism.frontend.http.fair_lock import FairLock, client_name
from prism.frontend.protocol.openai_types import GenerationBody
from prism.frontend.text.tokenizers import ModelTokenizer
from prism.messages.model_spec import ModelSpec
from prism.messages.requests import Grammar
from prism.process import child_environment
from prism.tasks import cancel_all

CHARS_MAX = 64 << 10
TRIAL_CPU_S_MAX = 10.0
# Wall time, for a machine that gives the process no CPU time.
TRIAL_S_MAX = 60.0
_START_S_MAX = 60.0
_KNOWN_MAX = 1024
TRIALS_MAX = 32  # waiting or running
TRIALS_OF_A_CLIENT_MAX = 8
# Limited, since a valid grammar may time out on a loaded machine.
_FAILURE_KNOWN_S = 60.0
_ENDED_S = 1.0  # for the exit status of a process that closed its pipe
_LINE_BYTES_MAX = 1 << 20

# Field, as named by SGLang or vLLM -> kind of structure.
_FIELDS = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "ebnf",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
    "guided_choice": "choice",
}
# Type of a response_format -> its fields.
_FORMAT_FIELDS = {"json_object": {"type"}, "json_schema": {"type", "json_schema"}}
_STRUCTURED = {"json": "json", "regex": "regex", "grammar": "ebnf", "choice": "choice"}


def grammar_of(body: GenerationBody) -> tuple[Grammar, str] | None:
    """Returns the grammar of the output and the field that requests it. Raises BadRequestError."""
    asked = [(_FIELDS[f], getattr(body, f), f) for f in _FIELDS if getattr(body, f) is not None]
    asked += _of_response_format(body.response_format)
    asked += [
        (_STRUCTURED[name], value, "structured_outputs")
        for name, value in (body.structured_outputs or {}).items()
        if value is not None and name in _STRUCTURED
    ]
    unknown = set(body.structured_outputs or {}) - set(_STRUCTURED)
    if unknown:
        raise _refused("structured_outputs", f"{min(unknown)!r:.80} is not supported; remove it")
    if not asked:
        return None
    if len(asked) > 1:
        message = f"cannot be combined with {asked[0][2]}; remove one of them"
        raise _refused(asked[1][2], message)
    kind, value, field = asked[0]
    return _grammar(kind, value, field), field


def _of_response_format(value: dict[str, Any] | None) -> list[tuple[str, Any, str]]:
    field = "response_format"
    kind = (value or {"type": "text"}).get("type")
    if value is None or kind == "text":
        return []
    given = {name for name, part in value.items() if part is not None}
    if kind in _FORMAT_FIELDS and (more := given - _FORMAT_FIELDS[kind]):
        message = f"{min(more)!r:.80} is not a field of {kind}; set a schema as json_schema.schema"
        raise _refused(field, message)
    if kind == "json_object":
        return [("json", {"type": "object"}, field)]
    if kind == "json_schema":
        schema = value.get("json_schema")
        schema = schema.get("schema") if isinstance(schema, dict) else None
        if not isinstance(schema, dict | bool):
            raise _refused(field, "json_schema.schema must be a JSON schema")
        return [("json", schema, field)]
    if kind == "structural_tag":
        return [("structural_tag", value, field)]
    if kind in ("regex", "grammar", "ebnf"):
        text = value.get("pattern") or value.get("grammar") or value.get(kind)
        return [("regex" if kind == "regex" else "ebnf", text, field)]
    known = "text, json_object, json_schema, structural_tag, regex or grammar"
    raise _refused(field, f"type must be {known}")


def _grammar(kind: str, value: Any, field: str) -> Grammar:
    if kind == "choice":
        return checked(Grammar("ebnf", _choice_text(value, field)), field)
    if kind in ("json", "structural_tag"):
        return checked(Grammar(kind, _json_text(value, field)), field)  # type: ignore[arg-type]
    if not isinstance(value, str) or not value:
        raise _refused(field, "must be a non-empty string")
    _refuse_long(len(value), field)
    return checked(Grammar("regex" if kind == "regex" else "ebnf", value), field)


def _choice_text(value: Any, field: str) -> str:
    options = value if isinstance(value, list) else []
    _refuse_long(len(options), field)
    if not options or not all(isinstance(o, str) and o for o in options):
        raise _refused(field, "must be a list of non-empty strings")
    _refuse_long(sum(map(len, options)), field)
    # XGrammar reads the escape of a surrogate pair as two characters.
    return "root ::= " + " | ".join(json.dumps(option, ensure_ascii=False) for option in options)


def _json_text(value: Any, field: str) -> str:
    try:
        if isinstance(value, str):
            _refuse_long(len(value), field)
            value = json.loads(value)
        if not isinstance(value, dict | bool):
            raise _refused(field, "must be a JSON schema")
        parts, length = [], 0
        # Encoded in parts, since megabytes would block the event loop.
        for part in json.JSONEncoder(ensure_ascii=False).iterencode(value):
            parts.append(part)
            length += len(part)
            _refuse_long(length, field)
        _refuse_bounded_patterns(value, field)
        return "".join(parts)
    except (ValueError, RecursionError) as error:
        raise _refused(field, f"is not valid JSON: {error}") from error


def _refuse_bounded_patterns(schema: Any, field: str) -> None:
    """Rejects schemas with both a pattern and a length: XGrammar ignores the length, and the answer
    might not be valid."""
    if isinstance(schema, list):
        for part in schema:
            _refuse_bounded_patterns(part, field)
    elif isinstance(schema, dict):
        bounds = [b for b in ("minLength", "maxLength") if isinstance(schema.get(b), int)]
        if bounds and isinstance(schema.get("pattern"), str):
            text = f"{bounds[0]} cannot be combined with a pattern; use {{3,5}} in the pattern"
            raise _refused(field, text)
        for name, part in schema.items():
            if name not in ("const", "enum", "default", "examples"):
                _refuse_bounded_patterns(part, field)


def _refuse_long(length: int, field: str) -> None:
    if length > CHARS_MAX:
        raise _refused(field, f"has more than {CHARS_MAX} characters; shorten it")


def checked(grammar: Grammar, field: str) -> Grammar:
    """Returns `grammar`. Raises BadRequestError if it is too long or has a NUL character."""
    _refuse_long(len(grammar.text), field)
    # XGrammar aborts the process on a NUL.
    if "\0" in grammar.text or "\\u0000" in grammar.text:
        raise _refused(field, "has a NUL character; remove it")
    return grammar


def _refused(field: str, text: str) -> RequestError:
    return bad_request(f"{field}: {text}", field)


class GrammarTrials:
    """Compiler of grammars in a separate process, which may crash, before an engine compiles them.
    For one event loop."""

    def __init__(self, adapter: str) -> None:
        self._adapter = adapter
        self._module = grammars_module(adapter, "try_grammar")
        # Grammar's digest -> its error ("" for none), and until when that is valid, s (monotonic).
        self._known: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._trials: dict[bytes, asyncio.Task[str]] = {}
        self._clients: Counter[str] = Counter()  # client -> its waiting and running trials
        self._lock = FairLock()
        self._process: asyncio.subprocess.Process | None = None
        self._used_s = 0.0  # CPU time of the last trial

    async def check(
        self, model: ModelSpec, tokenizer: ModelTokenizer, grammar: Grammar, field: str
    ) -> None:
        """Raises BadRequestError if the grammar cannot be compiled, OverloadedError if too many are
        waiting, and UnavailableError if none can be tried."""
        if not self._module:
            message = f"the {self._adapter} engine does not support grammars; remove it"
            raise _refused(field, message)
        key = f"{model.path}\n{grammar.kind}\n{grammar.text}"
        name = blake2b(key.encode(errors="replace"), digest_size=16).digest()
        error, until_s = self._known.get(name, ("", 0.0))
        if time.monotonic() >= until_s:
            # Not cancelled with this client, since others may wait for the same trial.
            error = await asyncio.shield(self._trial(name, model, tokenizer, grammar))
        if error:
            raise _refused(field, f"cannot be compiled: {error:.500}")

    async def close(self) -> None:
        await cancel_all(self._trials.values())
        await self._end()

    def _trial(
        self, name: bytes, model: ModelSpec, tokenizer: ModelTokenizer, grammar: Grammar
    ) -> asyncio.Task[str]:
        if name not in self._trials:
            client = client_name()
            if len(self._trials) >= TRIALS_MAX or self._clients[client] >= TRIALS_OF_A_CLIENT_MAX:
                raise OverloadedError("too many grammars are waiting for a trial; try again later")
            trial = asyncio.create_task(self._in_turn(name, client, model, tokenizer, grammar))
            trial.add_done_callback(lambda done: self._forget(name, client, done))
            self._trials[name] = trial
            self._clients[client] += 1
        return self._trials[name]

    def _forget(self, name: bytes, client: str, trial: asyncio.Task[str]) -> None:
        del self._trials[name]
        self._clients[client] -= 1
        self._clients += Counter()  # drops what is zero
        if not trial.cancelled():
            trial.exception()  # retrieved, since all waiting clients may have disconnected

    async def _in_turn(
        self,
        name: bytes,
        client: str,
        model: ModelSpec,
        tokenizer: ModelTokenizer,
        grammar: Grammar,
    ) -> str:
        await self._lock.acquire(client)
        self._used_s = 0.0
        try:
            error, known_s = await self._try(model, tokenizer, grammar)
        finally:
            self._lock.release(client, self._used_s)
        self._known[name] = error, time.monotonic() + known_s
        if len(self._known) > _KNOWN_MAX:
            self._known.popitem(last=False)
        return error

    async def _try(
        self, model: ModelSpec, tokenizer: ModelTokenizer, grammar: Grammar
    ) -> tuple[str, float]:
        """Returns the error ("" for none), and for how many seconds it is valid."""
        fresh = await self._ready(model, tokenizer)
        try:
            return await self._ask(model, tokenizer, grammar, TRIAL_S_MAX), math.inf
        except TimeoutError as error:
            await self._end()
            raise UnavailableError("grammars cannot be tried now; try again later") from error
        except EOFError:
            status = await self._end(_ENDED_S)
            if status == -signal.SIGPROF:
                self._used_s = TRIAL_CPU_S_MAX
                return f"it takes longer than {TRIAL_CPU_S_MAX:g} s", _FAILURE_KNOWN_S
            if fresh:
                return "it crashes the compiler", _FAILURE_KNOWN_S
            # Earlier grammars may have used up the process's memory.
            return await self._try(model, tokenizer, grammar)
        except BaseException:
            await self._end()  # a late answer would be read as the next trial's
            raise

    async def _ready(self, model: ModelSpec, tokenizer: ModelTokenizer) -> bool:
        """Starts the process if none runs. Returns whether it is new."""
        if self._process is not None and self._process.returncode is None:
            return False
        # A first trial that always compiles, so that imports do not count against a client.
        empty = Grammar("ebnf", 'root ::= "a"')
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self._module,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=_LINE_BYTES_MAX,
                env=child_environment(),
            )  # fmt: skip
            await self._ask(model, tokenizer, empty, _START_S_MAX)
        except (OSError, EOFError) as error:  # a timeout is an OSError
            await self._end()
            raise UnavailableError("grammars cannot be tried now; try again later") from error
        except BaseException:
            await self._end()
            raise
        return True

    async def _end(self, wait_s: float = 0.0) -> int:
        """Kills the process unless it exits within `wait_s`. Returns its exit status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                return await process.wait()
        process.kill()
        return await process.wait()

    async def _ask(
        self, model: ModelSpec, tokenizer: ModelTokenizer, grammar: Grammar, limit_s: float
    ) -> str:
        """Returns the error of compiling `grammar`, "" for none. Raises TimeoutError, or EOFError
        if the process died."""
        assert self._process is not None
        asked = {"directory": model.path, "vocab_size": tokenizer.vocab_size}
        asked |= {"kind": grammar.kind, "text": grammar.text, "cpu_s_max": TRIAL_CPU_S_MAX}
        line = json.dumps(asked).encode() + b"\n"
        found = json.loads(
            await exchange(self._process, line, asyncio.StreamReader.readline, limit_s)
        )
        self._used_s = float(found["cpu_s"])
        return str(found["error"])
