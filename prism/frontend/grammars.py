"""Structured output: what a body asks for, and whether it can be compiled."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import signal
import sys
import time
from collections import Counter, OrderedDict
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from prism.errors import RequestError
from prism.frontend import calls
from prism.frontend.errors import OverloadedError, UnavailableError, bad_request
from prism.frontend.openai_types import GenerationBody
from prism.frontend.tokenizers import ModelTokenizer
from prism.messages.models import ModelSpec
from prism.messages.requests import Grammar
from prism.process import child_environment
from prism.tasks import cancel_all

CHARS_MAX = 64 << 10
TRIAL_CPU_S_MAX = 10.0
# On a machine that gives the process no CPU time.
TRIAL_S_MAX = 60.0
_START_S_MAX = 60.0
_KNOWN_MAX = 1024
TRIALS_MAX = 32  # that wait or run
TRIALS_OF_A_CLIENT_MAX = 8
# A loaded machine makes a good grammar take too long.
_FAILURE_KNOWN_S = 60.0
_ENDED_S = 1.0  # until the kernel tells of a process whose pipe is closed
_LINE_BYTES_MAX = 1 << 20

# field -> what it asks for, in SGLang's and vLLM's names
_FIELDS = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "ebnf",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
    "guided_choice": "choice",
}
# What a response_format of these types has.
_FORMAT_FIELDS = {"json_object": {"type"}, "json_schema": {"type", "json_schema"}}
_STRUCTURED = {"json": "json", "regex": "regex", "grammar": "ebnf", "choice": "choice"}


def grammar_of(body: GenerationBody) -> tuple[Grammar, str] | None:
    """What the output must match, and the field that says so. Raises BadRequestError."""
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
        raise _refused(asked[1][2], f"{asked[0][2]} asks for a structure, too; give one of them")
    kind, value, field = asked[0]
    return _grammar(kind, value, field), field


def _of_response_format(value: dict[str, Any] | None) -> list[tuple[str, Any, str]]:
    field = "response_format"
    kind = (value or {"type": "text"}).get("type")
    if value is None or kind == "text":
        return []
    given = {name for name, part in value.items() if part is not None}
    if kind in _FORMAT_FIELDS and (more := given - _FORMAT_FIELDS[kind]):
        raise _refused(field, f"{kind} has no {min(more)!r:.80}; a schema goes with json_schema")
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
        raise _refused(field, "must be a text")
    _refuse_long(len(value), field)
    return checked(Grammar("regex" if kind == "regex" else "ebnf", value), field)


def _choice_text(value: Any, field: str) -> str:
    options = value if isinstance(value, list) else []
    _refuse_long(len(options), field)
    if not options or not all(isinstance(o, str) and o for o in options):
        raise _refused(field, "must be a list of texts")
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
        # In parts: megabytes would hold up the event loop.
        for part in json.JSONEncoder(ensure_ascii=False).iterencode(value):
            parts.append(part)
            length += len(part)
            _refuse_long(length, field)
        _refuse_bounded_patterns(value, field)
        return "".join(parts)
    except (ValueError, RecursionError) as error:
        raise _refused(field, f"is not JSON: {error}") from error


def _refuse_bounded_patterns(schema: Any, field: str) -> None:
    """XGrammar keeps to the pattern alone, and the answer might not be valid."""
    if isinstance(schema, list):
        for part in schema:
            _refuse_bounded_patterns(part, field)
    elif isinstance(schema, dict):
        bounds = [b for b in ("minLength", "maxLength") if isinstance(schema.get(b), int)]
        if bounds and isinstance(schema.get("pattern"), str):
            text = (
                f"{bounds[0]} beside a pattern is not kept; write it into the pattern, as {{3,5}}"
            )
            raise _refused(field, text)
        for name, part in schema.items():
            if name not in ("const", "enum", "default", "examples"):
                _refuse_bounded_patterns(part, field)


def _refuse_long(length: int, field: str) -> None:
    if length > CHARS_MAX:
        raise _refused(field, f"has more than {CHARS_MAX} characters; shorten it")


def checked(grammar: Grammar, field: str) -> Grammar:
    """The same. Raises BadRequestError for one that is not even tried."""
    _refuse_long(len(grammar.text), field)
    # XGrammar ends its process at one.
    if "\0" in grammar.text or "\\u0000" in grammar.text:
        raise _refused(field, "has a NUL character; remove it")
    return grammar


def _refused(field: str, text: str) -> RequestError:
    return bad_request(f"{field}: {text}", field)


class Turns:
    """Turns at something that one client at a time can use. The client that has used it least is
    next (start-time fair queueing). For one event loop."""

    def __init__(self) -> None:
        self._used_s: dict[str, float] = {}
        self._floor_s = 0.0  # of clients that come anew: what the one in turn had used
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []
        self._is_taken = False

    async def take(self, client: str) -> None:
        """Waits for the client's turn, which lasts until `end`."""
        self._used_s[client] = max(self._used_s.get(client, 0.0), self._floor_s)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((client, turn))
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.end(client, 0.0)
            self._waiting = [(c, t) for c, t in self._waiting if t is not turn]
            raise

    def end(self, client: str, used_s: float) -> None:
        self._used_s[client] += used_s
        self._is_taken = False
        self._next()
        if not self._is_taken:
            self._used_s.clear()
            self._floor_s = 0.0

    def _next(self) -> None:
        if self._is_taken or not self._waiting:
            return
        client, turn = found = min(self._waiting, key=lambda each: self._used_s[each[0]])
        self._waiting.remove(found)
        self._floor_s, self._is_taken = self._used_s[client], True
        turn.set_result(None)


class GrammarTrials:
    """Has each grammar compiled in a process that may die of it, before an engine compiles it.
    For one event loop."""

    def __init__(self, adapter: str) -> None:
        self._adapter = adapter
        self._module = f"prism.engines.{adapter}.try_grammar"
        self._can = importlib.util.find_spec(self._module) is not None
        # What is wrong with a grammar ("": nothing), and until when that is known, s (monotonic).
        self._known: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._trials: dict[bytes, asyncio.Task[str]] = {}
        self._clients: Counter[str] = Counter()  # of those that wait or run
        self._turns = Turns()
        self._process: asyncio.subprocess.Process | None = None
        self._used_s = 0.0  # CPU time of the trial that ended last

    async def check(
        self, model: ModelSpec, tokenizer: ModelTokenizer, grammar: Grammar, field: str
    ) -> None:
        """Raises BadRequestError for one that cannot be compiled, OverloadedError where too many
        wait, UnavailableError where none can be tried."""
        if not self._can:
            raise _refused(field, f"the {self._adapter} engine has no grammars; remove it")
        said = f"{model.path}\n{grammar.kind}\n{grammar.text}"
        name = blake2b(said.encode(errors="replace"), digest_size=16).digest()
        error, until_s = self._known.get(name, ("", 0.0))
        if time.monotonic() >= until_s:
            # Others may wait for the same trial: it goes on although this client goes away.
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
            client = _client()
            if len(self._trials) >= TRIALS_MAX or self._clients[client] >= TRIALS_OF_A_CLIENT_MAX:
                raise OverloadedError("too many new grammars wait to be tried; try again later")
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
            trial.exception()  # those who waited have raised it, unless all have gone

    async def _in_turn(
        self,
        name: bytes,
        client: str,
        model: ModelSpec,
        tokenizer: ModelTokenizer,
        grammar: Grammar,
    ) -> str:
        await self._turns.take(client)
        self._used_s = 0.0
        try:
            error, known_s = await self._try(model, tokenizer, grammar)
        finally:
            self._turns.end(client, self._used_s)
        self._known[name] = error, time.monotonic() + known_s
        if len(self._known) > _KNOWN_MAX:
            self._known.popitem(last=False)
        return error

    async def _try(
        self, model: ModelSpec, tokenizer: ModelTokenizer, grammar: Grammar
    ) -> tuple[str, float]:
        """What is wrong, and how long that holds, s."""
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
                return "it ends the compiler", _FAILURE_KNOWN_S
            # What was compiled before may have taken the memory.
            return await self._try(model, tokenizer, grammar)
        except BaseException:
            await self._end()  # an answer that nobody reads would be taken for the next one
            raise

    async def _ready(self, model: ModelSpec, tokenizer: ModelTokenizer) -> bool:
        """Whether the process is a new one."""
        if self._process is not None and self._process.returncode is None:
            return False
        # One that always compiles: the time of imports is nobody's fault.
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
        """Ends the process, after `wait_s` unless it ends by itself. Returns its status."""
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
        """Raises TimeoutError, or EOFError where the process died."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        asked = {"directory": model.path, "vocab_size": tokenizer.vocab_size}
        asked |= {"kind": grammar.kind, "text": grammar.text, "cpu_s_max": TRIAL_CPU_S_MAX}
        line = json.dumps(asked)
        try:
            async with asyncio.timeout(limit_s):
                process.stdin.write(line.encode() + b"\n")
                await process.stdin.drain()
                answer = await process.stdout.readline()
        except TimeoutError:
            raise
        except OSError as error:
            raise EOFError from error
        if not answer:
            raise EOFError
        found = json.loads(answer)
        self._used_s = float(found["cpu_s"])
        return str(found["error"])


def _client() -> str:
    """Returns the key of the request in hand, or its client's address where there are no keys."""
    call = calls.current.get()
    return (call.key or call.client) if call is not None else ""
