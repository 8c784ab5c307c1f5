"""SGLang's parsers of tool calls and reasoning in answers, for each model's own format.

They process text alone; `parser_library.py` imports them without the rest of SGLang.
"""

from __future__ import annotations

import json
import re
from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prism.cpu_budget import CpuBudget
from prism.engines.sglang.grammars.parser_library import library

# Bound of white space between two parts of JSON. Small models may otherwise write nothing else.
WHITESPACE_MAX = 32
_PIECE_CHARS = 8
_BUFFER_PIECES = 16
# Texts that a model writes as one token and that parsers do not recognise in parts: special tokens
# and the detector's attributes that hold the marks of a format.
_SPECIAL_TOKEN = r"<[|\uff5c][^<>|\uff5c]{1,64}[|\uff5c]>"
_MARKS = ("bot_token", "eot_token", "tool_call_start_token", "tool_call_end_token")
_TOKEN_CHARS_MAX = 80
# CPU time allowed for the parsers of one answer: at the start, for each character, and the maximum
# for one call. Calls of 128 tools take a quarter of it per character; regular expressions that
# backtrack may take hours.
_BEGIN_S = 0.05
_CHAR_S = 100e-6
_CALL_S_MAX = 0.1


@dataclass(slots=True)
class Piece:
    """Parsed part of an answer."""

    reasoning: str = ""
    text: str = ""
    # (number of the call, name, part of the JSON arguments). Only a call's first part has a name;
    # the others have "".
    calls: list[tuple[int, str, str]] = field(default_factory=list)


class AnswerParser:
    """Incremental parser of one answer. A parser that fails, or takes too much CPU time for its
    text, is dropped; the rest of the answer is then plain text.

    Args:
        tool_parser: name of the parser of tool calls, "" for none.
        reasoning_parser: name of the parser of reasoning, "" for none.
        tools: tools of the request, as dicts or of `checked_tools`.
        tool_choice: choice among the tools, as in OpenAI's API.
        prompt: end of the prompt.
        loop: event loop of the main thread, where the parsers run.
    """

    def __init__(
        self,
        *,
        tool_parser: str,
        reasoning_parser: str,
        tools: Sequence[Any],
        tool_choice: Any,
        prompt: str,
        loop: AbstractEventLoop | None = None,
    ) -> None:
        self._budget = CpuBudget(_BEGIN_S, _CALL_S_MAX, loop)
        self._reasoning = _reasoning_parser(reasoning_parser, prompt) if reasoning_parser else None
        self._calls: Any = None
        self._tools: list[Any] = []
        if tools and tool_parser:
            self._tools = checked_tools(tools)
            self._calls = _call_parser(tool_parser, self._tools, tool_choice)
        self._array = isinstance(self._calls, library().array_parser.JsonArrayParser)
        marks = (getattr(self._detector, name, None) for name in _MARKS) if self._calls else ()
        own = [
            re.escape(mark) for mark in marks if isinstance(mark, str) and len(mark) > _PIECE_CHARS
        ]
        self._token = re.compile("|".join([*own, _SPECIAL_TOKEN]))
        self._names: list[str] = []
        self._held = ""
        # Input and output text of the parser of calls before the first call.
        self._call_input: list[str] = []
        self._call_text: list[str] = []

    def push(self, text: str, *, last: bool = False) -> Piece:
        """Parses the next text of the answer; `last` marks its end. The parts of each call are
        joined, since some clients read only one part per call and event."""
        piece = Piece()
        text, start = self._held + text, 0
        while start < len(text):
            size = self._piece_chars()
            if token := self._token.search(text, start, start + size + _TOKEN_CHARS_MAX):
                begin, end = (at - start for at in token.span())
                size = min(size, begin) or end
            if not last and _PIECE_CHARS < size > len(text) - start:
                break
            self._budget.add(size * _CHAR_S)
            self._push(text[start : start + size], False, piece)
            if size > _PIECE_CHARS and self._calls is not None:
                self._drain(piece)
            start += size
        self._held = text[start:]
        if last:
            self._push("", True, piece)
        return _joined(piece) if len(piece.calls) > 1 else piece

    def _piece_chars(self) -> int:
        """Returns the size of the next piece for the parsers.

        The parsers are written for one token at a time: they lose text before the start of a call
        in the same piece. With each piece they parse a possible call again from its start, so
        pieces grow with its length.
        """
        if self._calls is None:
            return _PIECE_CHARS
        buffer = getattr(self._detector, "_buffer", "")
        return max(1, len(buffer) // _BUFFER_PIECES)

    def _drain(self, piece: Piece) -> None:
        """Parses until nothing more is found: a long piece may have the ends of several calls, but
        each call of the parser returns only one of them."""
        has_found = True
        while has_found:
            text, items = self._parse("", False)
            piece.text += text
            self._call_text.append(text)
            piece.calls += self._numbered(items)
            has_found = any(item.name or item.parameters for item in items)

    def whole(self, text: str, *, cut: bool = False) -> Piece:
        """Parses a whole answer at once, in linear time, unlike `push`. With `cut` the answer, and
        perhaps its last call, is incomplete; it is then parsed as a stream."""
        if cut and self._calls is not None:
            return self.push(text, last=True)
        piece = Piece()
        self._budget.add(len(text) * _CHAR_S)
        if self._reasoning is not None:
            piece.reasoning, text = self._reasoned(self._reasoning.parse_non_stream, text)
        rest, calls = self._whole_calls(text)
        piece.text = rest if calls else text
        piece.calls = [(number, *call) for number, call in enumerate(calls)]
        return piece

    def _whole_calls(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        """Returns the text outside of calls, and the calls as (name, arguments). Returns no calls
        if the text is incomplete or not in the parser's format."""
        try:
            if self._array:
                return "", [(c["name"], json.dumps(c["parameters"])) for c in json.loads(text)]
            if self._calls is not None and self._budget.call(self._calls.has_tool_call, text):
                rest, items = self._budget.call(self._calls.parse_non_stream, text)
                return rest, [(item.name or "", item.parameters) for item in items]
        except Exception:  # noqa: BLE001 - a model may have written anything
            return text, []
        return text, []

    def _push(self, text: str, last: bool, piece: Piece) -> None:
        if self._reasoning is not None:
            reasoning, text = self._reasoned(self._reasoning.parse_stream_chunk, text)
            piece.reasoning += reasoning
        if last and self._reasoning is not None:
            reasoning, rest = self._reasoned(self._reasoning.parse_stream_end)
            piece.reasoning, text = piece.reasoning + reasoning, text + rest
        if self._calls is not None:
            self._call_input.append(text)
            text, items = self._parse(text, last)
            piece.calls += self._numbered(items)
            if self._names or self._array:
                self._call_input, self._call_text = [], []
            else:
                self._call_text.append(text)
                text += self._unreturned_text() if last and self._calls is not None else ""
        piece.text += text

    def _reasoned(self, parse: Callable[..., Any], *text: str) -> tuple[str, str]:
        """Returns reasoning and other text."""
        detector = getattr(self._reasoning, "detector", None)
        held = str(getattr(detector, "_buffer", ""))
        try:
            reasoning, rest = self._budget.call(parse, *text)
        except Exception:  # noqa: BLE001 - a model may have written anything
            self._reasoning = None
            return "", held + "".join(text)
        return reasoning or "", rest or ""

    def _unreturned_text(self) -> str:
        """Returns the text that the parser held back as the possible start of a call, at the end of
        an answer without calls. The buffers of some parsers also hold text already returned."""
        given, returned = "".join(self._call_input), "".join(self._call_text)
        rest = given[len(returned) :] if given.startswith(returned) else given
        return min(rest, str(getattr(self._detector, "_buffer", "")), key=len)

    @property
    def _detector(self) -> Any:
        return self._calls if self._array else self._calls.detector

    def _parse(self, text: str, last: bool) -> tuple[str, list[Any]]:
        """Returns text and calls. If the parser fails, this and all later text is plain text."""
        held = str(getattr(self._detector, "_buffer", ""))
        try:
            return self._budget.call(self._parsed, text, last)
        except Exception:  # noqa: BLE001 - a model may have written anything, for any tool
            self._calls = None
            return held + text, []

    def _parsed(self, text: str, last: bool) -> tuple[str, list[Any]]:
        if self._array:
            results = [self._calls.parse_streaming_increment(text, self._tools)]
            results += [self._calls.finish(self._tools)] if last else []
            plain = "".join(result.normal_text or "" for result in results)
            return plain, [call for result in results for call in result.calls]
        given = str(getattr(self._detector, "_buffer", "")) + text
        plain, items = self._calls.parse_stream_chunk(text)
        end = getattr(self._detector, "eot_token", None) or ""
        if len(end) == 1 and not self._names and plain == given.replace(end, ""):
            plain = given  # Mistral's parser removes every "]" as the end of calls
        if last:
            rest, more = self._calls.parse_stream_end()
            plain, items = (plain or "") + rest, [*items, *more]
        return plain or "", items

    def _numbered(self, items: Sequence[Any]) -> list[tuple[int, str, str]]:
        """Returns the items with the numbers of their calls. Drops arguments before the first call,
        which some parsers return."""
        calls = []
        for item in items:
            if item.name:
                self._names.append(item.name)
            if self._names or item.name is not None:
                calls.append((max(0, len(self._names) - 1), item.name or "", item.parameters or ""))
        return calls


def _joined(piece: Piece) -> Piece:
    """Returns the piece with the parts of each call joined."""
    calls: dict[int, tuple[str, str]] = {}
    for number, name, arguments in piece.calls:
        before = calls.get(number, ("", ""))
        calls[number] = before[0] + name, before[1] + arguments
    return Piece(piece.reasoning, piece.text, [(number, *call) for number, call in calls.items()])


def constraint(
    tool_parser: str, tools: Sequence[dict[str, Any]], tool_choice: Any, parallel: bool
) -> tuple[str, str] | None:
    """Returns (kind, text) of the grammar that enforces the tool choice, None if the output is
    unrestricted. Arguments follow the schemas of strict tools, and are always objects. A named tool
    is called once."""
    parallel = parallel and not isinstance(tool_choice, dict)
    parser = library().calls.FunctionCallParser(
        checked_tools(tools), tool_parser, tool_choice=_choice(tool_choice)
    )
    found = parser.get_structure_constraint(_choice(tool_choice), parallel)
    if found is None:
        return None
    kind, value = found
    value = value if isinstance(value, str | dict) else value.model_dump(by_alias=True)
    if kind == "structural_tag":
        value = _new_form(json.loads(value) if isinstance(value, str) else value, parallel)
        _restrict_json(value)
    text = value if isinstance(value, str) else json.dumps(value)
    names = {"json_schema": "json", "full_assistant_ebnf": "ebnf"}
    return names.get(kind, kind), text


def _restrict_json(form: Any) -> None:
    """Restricts every JSON value in a structural tag to an object, if it is unrestricted, with
    bounded white space."""
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        for part in form.values() if isinstance(form, dict) else form:
            if isinstance(part, dict | list):
                _restrict_json(part)
        return
    if form["json_schema"] in ({}, True):
        form["json_schema"] = {"type": "object"}
    if form.get("max_whitespace_cnt") is None:
        form["max_whitespace_cnt"] = WHITESPACE_MAX


def detect(template: str, tokenizer: Any) -> tuple[str, str]:
    """Returns (tool parser, reasoning parser) for a chat template and its model's vocabulary
    (`get_vocab`), "" for each that is not known."""
    detection = library().detection
    force, config = detection.detect_reasoning_pattern(template)
    tool = detection.detect_tool_call_parser(template, tokenizer, config, force)
    reasoning = detection.detect_reasoning_parser(template, tokenizer, config, force)
    return tool or "", reasoning or ""


def unknown(tool_parser: str, reasoning_parser: str) -> str:
    """Returns an error for a name in the configuration that is not a parser, "" if both are."""
    found = library()
    known = {
        "tool_parser": (tool_parser, found.calls.FunctionCallParser.ToolCallParserEnum),
        "reasoning_parser": (reasoning_parser, found.reasoning.ReasoningParser.DetectorMap),
    }
    for key, (name, names) in known.items():
        if name and name not in names:
            return f"{key}: {name!r} is unknown; give one of {', '.join(sorted(names))}"
    return ""


def _reasoning_parser(name: str, prompt: str) -> Any:
    """Returns a parser of reasoning, None if the prompt has ended the reasoning and the parser
    would wait for its end."""
    parser = library().reasoning.ReasoningParser
    made = parser(name, stream_reasoning=True)
    start, end = _marks(made)
    prompt = prompt.rstrip()
    if start and prompt.endswith(start.rstrip()):
        return parser(name, stream_reasoning=True, force_reasoning=True)
    if end and prompt.endswith(end.rstrip()):
        made = parser(name, stream_reasoning=True, force_reasoning=False)
        return None if _starts_with_reasoning(made) else made
    return made


def _starts_with_reasoning(parser: Any) -> bool:
    """Returns whether the answer begins with reasoning."""
    return bool(getattr(parser.detector, "_in_reasoning", False))


def _marks(parser: Any) -> tuple[str, str]:
    detector = parser.detector
    marks = (getattr(detector, "think_start_token", ""), getattr(detector, "think_end_token", ""))
    return marks[0] or "", marks[1] or ""


def through_mark(reasoning_parser: str, begun: str) -> str:
    """Returns the text of an answer to be continued, up to the last mark at which its reasoning
    began or ended; without a mark the whole text."""
    marks = _marks(library().reasoning.ReasoningParser(reasoning_parser))
    ends = [begun.rfind(mark) + len(mark) for mark in marks if mark and mark in begun]
    return begun[: max(ends)] if ends else begun


def after_reasoning(reasoning_parser: str, prompt: str, kind: str, text: str) -> tuple[str, str]:
    """Returns (kind, text) of a grammar that applies after the reasoning with which the answer
    begins. Returns the given grammar if the answer does not begin with reasoning."""
    parser = _reasoning_parser(reasoning_parser, prompt)
    end = _marks(parser)[1] if parser is not None and _starts_with_reasoning(parser) else ""
    if not end:
        return kind, text
    answer = _as_form(kind, text)
    reasoning = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end}
    form = {"type": "sequence", "elements": [reasoning, answer]}
    return "structural_tag", json.dumps({"type": "structural_tag", "format": form})


def _as_form(kind: str, text: str) -> Any:
    if kind == "json":
        form = {"type": "json_schema", "json_schema": json.loads(text)}
        return {**form, "max_whitespace_cnt": WHITESPACE_MAX}
    if kind == "structural_tag":
        return json.loads(text)["format"]
    if kind == "regex":
        return {"type": "regex", "pattern": text}
    return {"type": "grammar", "grammar": text}


def _call_parser(name: str, tools: list[Any], tool_choice: Any) -> Any:
    found = library()
    choice = _choice(tool_choice)
    made = found.calls.FunctionCallParser(tools, name, tool_choice=choice)
    if choice == "auto" or made.owns_tool_format():
        return made
    return found.array_parser.JsonArrayParser()


def checked_tools(tools: Sequence[Any]) -> list[Any]:
    """Returns the tools converted to SGLang's type."""
    return [library().protocol.Tool.model_validate(tool) for tool in tools]


def _choice(value: Any) -> Any:
    if isinstance(value, dict):
        return library().protocol.ToolChoice.model_validate(value)
    return value or "auto"


def _new_form(tag: dict[str, Any], parallel: bool) -> dict[str, Any]:
    """Converts SGLang's older structural tags to XGrammar's. `parallel` allows several calls."""
    if "structures" not in tag:
        return tag
    tags = [
        {
            "type": "tag",
            "begin": each["begin"],
            "content": {"type": "json_schema", "json_schema": each.get("schema") or {}},
            "end": each["end"],
        }
        for each in tag["structures"]
    ]
    at_least_one = bool(tag.get("at_least_one"))
    form = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    ends = {"at_least_one": at_least_one, "stop_after_first": not parallel}
    return {"type": "structural_tag", "format": {**form, **ends}}
