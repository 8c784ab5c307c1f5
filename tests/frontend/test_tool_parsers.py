"""SGLang's parsers of tool calls and reasoning, fed with streamed pieces of any size."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.frontend.test_tools import CALLS, WEATHER
from tests.frontend.tool_forms import FORMS, UNFORMED

pytestmark = pytest.mark.usefixtures("parser_modules")


def parser_of(tool_parser: str, choice: str = "auto", prompt: str = "", reasoning: str = "") -> Any:
    from prism.engines.sglang.grammars import parsers

    return parsers.AnswerParser(
        tool_parser=tool_parser,
        reasoning_parser=reasoning,
        tools=[WEATHER],
        tool_choice=choice,
        prompt=prompt,
    )


def streamed_by(parser: Any, text: str, step: int) -> tuple[str, list[tuple[str, str]]]:
    # A special token comes whole.
    begin = "<[|\uff5c]"
    parts = re.findall(rf"(?s){begin}.*?>|(?:(?!{begin}).){{1,{step}}}", text)
    return streamed(parser, parts if step < len(text) else [text])


def streamed(parser: Any, parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Returns the text and calls of an answer that arrives in these parts."""
    said, calls = "", dict[int, tuple[str, str]]()
    for at, part in enumerate(parts, 1):
        piece = parser.push(part, last=at == len(parts))
        said += piece.text
        for number, name, arguments in piece.calls:
            before = calls.get(number, ("", ""))
            calls[number] = before[0] + name, before[1] + arguments
    return said, list(calls.values())


def pieces_of(name: str, text: str, step: int) -> list[str]:
    """Splits text as a detokenizer does: the parser's marks and special tokens stay whole."""
    parser = parser_of(name)
    found, at = list[str](), 0
    while at < len(text):
        token = parser._token.search(text, at)
        begin, end = token.span() if token else (len(text), len(text))
        found += [text[i : min(i + step, begin)] for i in range(at, begin, step)]
        found += [text[begin:end]] if token else []
        at = end
    return found


def sglangs(name: str, pieces: list[str], tool: Any = WEATHER) -> tuple[str, list[tuple[str, str]]]:
    """Returns the text and calls that SGLang's own parser finds in these pieces."""
    from prism.engines.sglang.grammars import parsers

    parser = parsers.library().calls.FunctionCallParser(parsers.checked_tools([tool]), name)
    found = [*map(parser.parse_stream_chunk, pieces), parser.parse_stream_end()]
    calls = list[tuple[str, str]]()
    for item in (item for _, items in found for item in items):
        if item.name:
            calls.append((item.name, ""))
        if calls:  # some report arguments before any call
            calls[-1] = calls[-1][0], calls[-1][1] + (item.parameters or "")
    return "".join(said or "" for said, _ in found), calls


def known() -> set[str]:
    from prism.engines.sglang.grammars import parsers

    return set(parsers.library().calls.FunctionCallParser.ToolCallParserEnum)


def test_each_parser_has_a_form() -> None:
    assert set(FORMS) | UNFORMED == known()


@pytest.mark.parametrize("name", FORMS)
def test_each_parser_says_what_it_says_in_sglang(name: str) -> None:
    """Holds however many tokens arrive at a time, and for whole answers."""
    begin = "" if name in ("gpt-oss", "muse") else "So: "
    text = begin + FORMS[name]
    said, calls = sglangs(name, pieces_of(name, text, 1))
    [(called, arguments)] = calls
    assert (said.strip(), called, json.loads(arguments)) == (
        begin.strip(),
        "weather",
        {"city": "Oslo"},
    )
    for step in (1, 2, 5, 13):
        for pieces in (pieces_of(name, text, step), [text]):
            found = streamed(parser_of(name), pieces)
            assert (found[0].strip(), found[1]) == (said.strip(), calls), (step, len(pieces))
    piece = parser_of(name).whole(text)
    [(_, called, arguments)] = piece.calls
    assert (piece.text.strip(), called) == (begin.strip(), "weather")
    assert json.loads(arguments) == {"city": "Oslo"}


VALUES = ("", "São Paulo", "New York, NY", "O'Hare", "12", "true", "東京🗼", "a <b> & c", "[1, 2]")


@pytest.mark.parametrize("name", FORMS)
def test_other_values_more_calls_and_text_behind_are_as_in_sglang(name: str) -> None:
    """Ignores white space, and a bracket that Mistral's parser may leave between two lists."""
    begin, form = ("" if name in ("gpt-oss", "muse") else "So: "), FORMS[name]
    texts = [begin + form.replace("Oslo", value) for value in VALUES]
    texts += [begin + form + form, begin + form + "\n" + form.replace("Oslo", "Rome")]
    texts += [begin + form + " Done.", begin + form + "\n\nDone. [1]"]
    for text in texts:
        said, calls = sglangs(name, pieces_of(name, text, 1))
        for step in (1, 4, len(text)):
            found = streamed(parser_of(name), pieces_of(name, text, step))
            assert found[1] == calls, (text, step)
            shown = found[0].replace("]", "") if name == "mistral" else found[0]
            whole = said.replace("]", "") if name == "mistral" else said
            assert shown.split() == whole.split(), (text, step)


NESTED = {"place": {"name": 'Åre }] "x"', "at": [63.4, [None, {}]]}, "now": True, "<b>": "\n"}


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if '{"city"' in form])
@pytest.mark.parametrize("escaped", [True, False])
def test_nested_arguments_are_as_in_sglang(name: str, escaped: bool) -> None:
    begin = "" if name == "gpt-oss" else "So: "
    arguments = json.dumps(NESTED, ensure_ascii=escaped)
    text = begin + FORMS[name].replace('{"city": "Oslo"}', arguments)
    theirs = sglangs(name, pieces_of(name, text, 1))
    for step in (1, 4, len(text)):
        _, [(called, mine)] = streamed(parser_of(name), pieces_of(name, text, step))
        assert [(called, mine)] == theirs[1], step
        assert (called, json.loads(mine)) == ("weather", NESTED)


def damaged(name: str) -> list[str]:
    """Returns the form with another tool's name, cut off, and with a token lost, doubled or
    inserted."""
    begin = "" if name in ("gpt-oss", "muse") else "So: "
    tokens = pieces_of(name, begin + FORMS[name], 1)
    texts = [begin + FORMS[name].replace("weather", "wether")]
    texts += ["".join(tokens[:end]) for end in range(1, len(tokens), 9)]
    for at in range(2, len(tokens), 11):
        for between in ([], [tokens[at]] * 2, [tokens[at], *" Ha🗼"]):
            texts.append("".join([*tokens[:at], *between, *tokens[at + 1 :]]))
    return texts


@pytest.mark.parametrize("name", FORMS)
def test_of_a_damaged_call_no_more_is_lost_than_in_sglang(name: str) -> None:
    """Finds the same calls and at least the same text, some of which SGLang drops."""
    for text in damaged(name):
        said, calls = sglangs(name, pieces_of(name, text, 1))
        for step in (1, 6):
            found, mine = streamed(parser_of(name), pieces_of(name, text, step))
            assert [called for called, _ in mine] == [called for called, _ in calls], text
            if step == 1:
                pairs = zip(mine, calls, strict=True)
                assert all(got.startswith(theirs) for (_, got), (_, theirs) in pairs), text
                shown = found.replace("]", "") if name == "mistral" else found
                whole = said.replace("]", "") if name == "mistral" else said
                assert shown.split() == whole.split() or (not mine and shown.startswith(whole))


def fails_at(parser: Any, turn: int) -> None:
    """Makes the parser's detector raise from this turn on."""
    detector, turns = parser._detector, iter(range(10**6))
    before = detector.parse_streaming_increment

    def failing(text: str, tools: Any) -> Any:
        if next(turns) >= turn:
            raise AttributeError("as of a schema that it does not expect")
        return before(text, tools)

    detector.parse_streaming_increment = failing


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_from_where_a_parser_fails_on_all_is_text(choice: str) -> None:
    forced = json.dumps([{"name": "weather", "parameters": {"city": "Oslo"}}])
    text = f"So: {FORMS['qwen25']} Done." if choice == "auto" else forced
    pieces = pieces_of("qwen25", text, 3)
    name = "qwen25" if choice == "auto" else "pythonic"
    parser = parser_of(name, choice)
    turns = parses_of(parser)
    streamed(parser, pieces)
    named = 0
    for turn in range(len(turns)):
        parser = parser_of(name, choice)
        fails_at(parser, turn)
        said, calls = streamed(parser, pieces)
        assert calls or said == text, turn
        assert said.endswith("Done.") or choice == "required", turn
        named += len(calls)
    assert 0 < named < len(turns)


def test_a_schema_that_a_parser_cannot_read_ends_no_stream() -> None:
    """Covers SGLang 0.5.23's parser for MiMo, which expects one type, not a list of types."""
    from prism.engines.sglang.grammars import parsers

    nullable = {"type": "object", "properties": {"city": {"type": ["string", "null"]}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": nullable}}
    for name, form in FORMS.items():
        pieces = pieces_of(name, form, 4)
        try:
            theirs = sglangs(name, pieces, tool)[1]
        except AttributeError:
            theirs = []
        parser = parsers.AnswerParser(
            tool_parser=name, reasoning_parser="", tools=[tool], tool_choice="auto", prompt=""
        )
        said, calls = streamed(parser, pieces)
        assert calls == theirs, name
        assert calls or said == form, name


@pytest.mark.parametrize("name", FORMS)
def test_an_answer_without_a_call_is_said_once_and_wholly(name: str) -> None:
    """Holds for answers that end within a mark. Some parsers keep text that they have emitted."""
    begin = FORMS[name][:4]
    for text in ("Plain text, with [brackets] and <tags>.", "So: ", f"So: {begin}"):
        for step in (1, 4, len(text)):
            said, calls = streamed(parser_of(name), pieces_of(name, text, step))
            assert (said.strip(), calls) == (text.strip(), []), (text, step)


def parses_of(parser: Any) -> list[int]:
    """Records how many characters each turn of the parser reads from now on."""
    lengths: list[int] = []
    detector = parser._detector
    before = detector.parse_streaming_increment

    def counted(text: str, tools: Any) -> Any:
        lengths.append(len(detector._buffer) + len(text))
        return before(text, tools)

    detector.parse_streaming_increment = counted
    return lengths


LONG_FORMS = {
    "qwen25": ('<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>', "\n"),
    "llama3": ('<|python_tag|>{"name": "weather", "arguments": %s}', ""),
    "mistral": ('[TOOL_CALLS] [{"name": "weather", "arguments": %s}]', ""),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        "<|tool_call_argument_begin|>%s<|tool_call_end|><|tool_calls_section_end|>",
        "",
    ),
    "deepseekv3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"  # noqa: RUF001
        "weather\n```json\n"
        "%s\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
        "",
    ),
    "pythonic": ("[weather(city=%r)]", ""),
}


@pytest.mark.parametrize("name", LONG_FORMS)
@pytest.mark.parametrize("step", [3, 1000, 10**6])
def test_a_long_call_is_streamed_in_pieces_that_grow(name: str, step: int) -> None:
    """Reads each character few times; SGLang reads the whole call again for each piece."""
    city = ("Øs}l (o) \n" if name == "pythonic" else "Øs}l] (o) \n") * 2000
    form, _ = LONG_FORMS[name]
    text = "So: " + form % (city if name == "pythonic" else json.dumps({"city": city}))
    parser = parser_of(name)
    lengths = parses_of(parser)
    said, [(called, arguments)] = streamed_by(parser, text, step)
    assert (said.strip(), called, json.loads(arguments)) == ("So:", "weather", {"city": city})
    assert sum(lengths) < 60 * len(text)


@pytest.mark.parametrize("step", [1, 5, 700, 10**6])
def test_a_piece_may_hold_the_ends_of_several_calls(step: int) -> None:
    cities = ["x" * 3000, "Oslo", "y" * 500, "Rome"]
    for name in ("qwen25", "llama3"):
        form, between = LONG_FORMS[name]
        calls = [form % json.dumps({"city": city}) for city in cities]
        _, found = streamed_by(parser_of(name), between.join(calls), step)
        assert [json.loads(arguments)["city"] for _, arguments in found] == cities, name
    forced = [{"name": "weather", "parameters": {"city": city}} for city in cities]
    _, found = streamed_by(parser_of("pythonic", "required"), json.dumps(forced), step)
    assert [json.loads(arguments)["city"] for _, arguments in found] == cities


def test_no_part_of_a_mark_is_text_wherever_the_text_is_cut() -> None:
    """Drops the mark between two calls even if a piece has its end and the start of the next
    one."""
    for step in range(1, 24):
        for first in range(step):
            starts = range(first, len(CALLS), step)
            parts = [CALLS[:first], *(CALLS[at : at + step] for at in starts)]
            parser, said, names = parser_of("qwen25"), "", list[str]()
            for at, part in enumerate(parts, 1):
                piece = parser.push(part, last=at == len(parts))
                said += piece.text
                names += [name for _, name, _ in piece.calls if name]
            assert (said.strip(), names) == ("", ["weather"] * 2), (step, first)


def test_json_that_could_be_a_call_costs_little() -> None:
    parser = parser_of("llama3")
    lengths = parses_of(parser)
    text = json.dumps({"answer": ["forty-two"] * 2000})
    assert streamed_by(parser, text, 4) == (text, [])
    assert sum(lengths) < 60 * len(text)


def test_what_a_parser_does_not_expect_stays_text() -> None:
    for text in ("[1]", '{"name": "unknown", "arguments": {}}', "{", '{"name": 1}'):
        answer = f"See: <tool_call>\n{text}\n</tool_call>"
        piece = parser_of("qwen25").whole(answer)
        assert (piece.text, piece.calls) == (answer, [])
    for text in ('{"a": {"b": 1}}', "[1]", '[{"name": "weather"}]', "7", "[" * 10**5):
        piece = parser_of("pythonic", "required").whole(text)
        assert (piece.text, piece.calls) == (text, [])


@pytest.mark.parametrize(
    ("name", "prompt", "opens"),
    [
        ("deepseek-r1", "x<think>\n", True),
        ("deepseek-r1", "x<think>\n\n</think>\n\n", False),
        ("deepseek-r1", "x", True),
        ("qwen3", "what does <think> do?<assistant>", False),
        ("qwen3", "what does </think> do?<assistant><think>\n", True),
        ("qwen3", "x<think>\n\n</think>\n\n", False),
    ],
)
def test_a_structure_begins_behind_the_reasoning(name: str, prompt: str, opens: bool) -> None:
    """Starts where the parser sees the reasoning end."""
    from prism.engines.sglang.grammars import parsers

    asked = ("json", '{"type": "object"}')
    kind, text = parsers.after_reasoning(name, prompt, *asked)
    piece = parser_of("", prompt=prompt, reasoning=name).whole("Hm.</think>Yes.")
    if opens:
        thought, answer = json.loads(text)["format"]["elements"]
        assert thought["end"] == "</think>"
        assert answer["json_schema"] == {"type": "object"}
        assert (kind, piece.reasoning, piece.text) == ("structural_tag", "Hm.", "Yes.")
    else:
        assert (kind, text) == asked
        assert not piece.reasoning


LIGHT = """
import logging, sys
from concurrent.futures import ThreadPoolExecutor
from prism.engines.sglang import parser_names
from prism.engines.sglang.grammars import parsers
named = parser_names()
assert not any(name.startswith("sglang") for name in sys.modules)
first = list(ThreadPoolExecutor(8).map(parsers.unknown, ["qwen25"] * 8, [""] * 8))
assert first == [""] * 8, first
for name in ("function_call.base_format_detector", "parser.reasoning_parser"):
    assert not logging.getLogger(f"sglang.srt.{name}").isEnabledFor(logging.ERROR), name
calls, reasoning = parsers.library().calls, parsers.library().reasoning
assert named["tool_parser"] == sorted(calls.FunctionCallParser.ToolCallParserEnum)
assert named["reasoning_parser"] == sorted(reasoning.ReasoningParser.DetectorMap)
assert not parsers.unknown("llama3", "deepseek-r1")
assert "nonsense" in parsers.unknown("nonsense", "")
tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
for name in ("qwen25", "llama3", "mistral", "kimi_k2", "pythonic"):
    assert parsers.constraint(name, [tool], "auto", True) is None
    kind, text = parsers.constraint(name, [tool], "required", True)
    assert kind in ("structural_tag", "json") and "structures" not in text, (name, kind, text)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


def test_the_parsers_import_neither_torch_nor_transformers() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True, timeout=60)
