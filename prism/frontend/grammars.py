"""Structured output: what a body asks for, and whether it can be compiled."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections import OrderedDict
from hashlib import blake2b
from typing import Any

from prism.errors import RequestError
from prism.frontend.errors import UnavailableError, bad_request
from prism.frontend.openai_types import GenerationBody
from prism.frontend.tokenizers import ModelTokenizer
from prism.messages.models import ModelSpec
from prism.messages.requests import Grammar

CHARS_MAX = 64 << 10
COMPILE_S_MAX = 10.0
_START_S_MAX = 60.0
_KNOWN_MAX = 1024
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
        options = value if isinstance(value, list) else []
        if not options or not all(isinstance(o, str) and o for o in options):
            raise _refused(field, "must be a list of texts")
        texts = " | ".join(json.dumps(option) for option in options)
        return _short(Grammar("ebnf", f"root ::= {texts}"), field)
    if kind in ("json", "structural_tag"):
        return _short(Grammar(kind, _json_text(value, field)), field)  # type: ignore[arg-type]
    if not isinstance(value, str) or not value:
        raise _refused(field, "must be a text")
    return _short(Grammar("regex" if kind == "regex" else "ebnf", value), field)


def _json_text(value: Any, field: str) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _refused(field, f"is not JSON: {error}") from error
    if not isinstance(value, dict | bool):
        raise _refused(field, "must be a JSON schema")
    return json.dumps(value, ensure_ascii=False)


def _short(grammar: Grammar, field: str) -> Grammar:
    if len(grammar.text) > CHARS_MAX:
        raise _refused(
            field, f"has {len(grammar.text)} characters; at most {CHARS_MAX} are allowed"
        )
    # XGrammar ends its process at one.
    if "\0" in grammar.text or "\\u0000" in grammar.text:
        raise _refused(field, "has a NUL character; remove it")
    return grammar


def _refused(field: str, text: str) -> RequestError:
    return bad_request(f"{field}: {text}", field)


class GrammarTrials:
    """Has each grammar compiled in a process that may die of it, before an engine compiles it.
    For one event loop."""

    def __init__(self, adapter: str) -> None:
        self._adapter = adapter
        self._module = f"prism.engines.{adapter}.try_grammar"
        self._can = importlib.util.find_spec(self._module) is not None
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._process: asyncio.subprocess.Process | None = None
        self._one = asyncio.Lock()

    async def check(
        self, model: ModelSpec, tokenizer: ModelTokenizer, grammar: Grammar, field: str
    ) -> None:
        """Raises BadRequestError for one that cannot be compiled."""
        if not self._can:
            raise _refused(field, f"the {self._adapter} engine has no grammars; remove it")
        said = f"{model.path}\n{grammar.kind}\n{grammar.text}"
        name = blake2b(said.encode(errors="replace"), digest_size=16).digest()
        async with self._one:
            if name not in self._known:
                self._known[name] = await self._try(model, tokenizer, grammar)
                if len(self._known) > _KNOWN_MAX:
                    self._known.popitem(last=False)
        if error := self._known[name]:
            raise _refused(field, f"cannot be compiled: {error:.500}")

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self._process = None

    async def _try(self, model: ModelSpec, tokenizer: ModelTokenizer, grammar: Grammar) -> str:
        if self._process is None:
            # One that always compiles: the time of imports is nobody's fault.
            empty = Grammar("ebnf", 'root ::= "a"')
            try:
                if error := await self._ask(model, tokenizer, empty, _START_S_MAX):
                    return error
            except (TimeoutError, EOFError) as error:
                await self.close()
                raise UnavailableError("grammars cannot be tried now; try again later") from error
        try:
            return await self._ask(model, tokenizer, grammar, COMPILE_S_MAX)
        except TimeoutError:
            await self.close()
            return f"it takes longer than {COMPILE_S_MAX:g} s"
        except EOFError:
            await self.close()
            return "it ends the compiler"
        except BaseException:
            await self.close()  # an answer that nobody reads would be taken for the next one
            raise

    async def _ask(
        self, model: ModelSpec, tokenizer: ModelTokenizer, grammar: Grammar, limit_s: float
    ) -> str:
        """Raises TimeoutError, or EOFError where the process died."""
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self._module,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=_LINE_BYTES_MAX,
            )  # fmt: skip
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        asked = {"directory": model.path, "vocab_size": tokenizer.vocab_size}
        line = json.dumps({**asked, "kind": grammar.kind, "text": grammar.text})
        try:
            async with asyncio.timeout(limit_s):
                process.stdin.write(line.encode() + b"\n")
                await process.stdin.drain()
                answer = await process.stdout.readline()
        except OSError as error:
            raise EOFError from error
        if not answer:
            raise EOFError
        return str(json.loads(answer)["error"])
