"""Characters, classes and constructs of regular expressions, EBNF and schemas: XGrammar keeps to
each, or the grammar is refused."""

from __future__ import annotations

import json
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from xgrammar import (
    CompiledGrammar,
    GrammarMatcher,
    TokenizerInfo,
    VocabType,
    allocate_token_bitmask,
)

from prism.engines.sglang.grammars.regexes import rewrite_ebnf, rewrite_regex
from prism.engines.sglang.grammars.vocabulary import JsonCompiler

pytestmark = pytest.mark.sglang

BYTES = [bytes([byte]) for byte in range(256)]
POINTS = [point for point in range(0x110000) if not 0xD800 <= point <= 0xDFFF]
IN_JSON = [point for point in POINTS if point >= 0x20 and chr(point) not in '"\\']
BOUNDED: list[dict[str, Any]] = [
    {"maxLength": 3},
    {"minLength": 1},
    {"minLength": 1, "maxLength": 3},
    {"maxLength": 100},
]


@cache
def compiler(characters: bool = False) -> JsonCompiler:
    """Makes a compiler with a token for each byte, and optionally for each character."""
    tokens = BYTES + [chr(point).encode() for point in IN_JSON if point >= 0x80] * characters
    info = TokenizerInfo([*tokens, b"</s>"], VocabType.RAW, stop_token_ids=[len(tokens)])
    return JsonCompiler(info, max_threads=2)


def allowed(matcher: GrammarMatcher, size: int) -> np.ndarray:
    """Returns the ids of the tokens that may come next."""
    mask = allocate_token_bitmask(1, size)
    matcher.fill_next_token_bitmask(mask)
    bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:size])


def takes(compiled: CompiledGrammar, text: str) -> bool:
    matcher = GrammarMatcher(compiled, terminate_without_stop_token=True)
    return matcher.accept_string(text) and matcher.is_terminated()


@cache
def continuations() -> dict[bytes, set[int]]:
    """Returns the bytes that may follow each incomplete UTF-8 sequence."""
    found: dict[bytes, set[int]] = defaultdict(set)
    for point in IN_JSON:
        written = chr(point).encode()
        for at in range(1, len(written)):
            found[written[:at]].add(written[at])
    return found


@pytest.mark.parametrize("bounds", BOUNDED)
def test_a_bounded_string_can_hold_each_character_as_bytes(bounds: dict[str, Any]) -> None:
    compiled = compiler().compile_json_schema(json.dumps({"type": "string", **bounds}))
    for begun, expected in continuations().items():
        matcher = GrammarMatcher(compiled)
        assert matcher.accept_string(b'"' + begun), begun
        assert set(allowed(matcher, 257).tolist()) == expected, begun


@pytest.mark.parametrize("bounds", BOUNDED)
def test_a_bounded_string_can_hold_each_character_as_a_token(bounds: dict[str, Any]) -> None:
    size = 257 + sum(point >= 0x80 for point in IN_JSON)
    made = compiler(characters=True)
    matcher = GrammarMatcher(made.compile_json_schema(json.dumps({"type": "string", **bounds})))
    matcher.accept_string('"')
    whole = np.arange(256, size - 1)
    assert np.isin(whole, allowed(matcher, size)).all()


STARTS = [
    0x20, 0x80, 0x800, 0x1000, 0x2000, 0xD000, 0xD040, 0xD7C0, 0xE000, 0xF000, 0x10000, 0x40000,
    0x100000, 0x10FFFF,
]  # fmt: skip
EDGES = sorted(
    {
        max(start + more, 1)
        for start in STARTS
        for more in (-1, 0, 1)
        if (start + more) in range(0x20, 0x110000) and not 0xD800 <= start + more <= 0xDFFF
    }
)


def written(point: int) -> str:
    return f"\\x{point:02x}" if point < 0x80 else chr(point)


@pytest.mark.parametrize("negated", [False, True])
@pytest.mark.parametrize("kind", ["regex", "pattern", "ebnf"])
def test_a_class_has_its_characters_and_no_others(kind: str, negated: bool) -> None:
    rng = random.Random(5)
    ranges = [*combinations(EDGES, 2), *zip(EDGES, EDGES, strict=True)]
    ends = sorted(rng.sample(POINTS[0x20:], 400))
    ranges += zip(ends[:200], ends[200:], strict=True)
    probes = [point for point in {*EDGES, *rng.sample(IN_JSON, 100)} if point >= 0x20]
    for low, high in ranges:
        text = f"[{'^' * negated}{written(low)}-{written(high)}]"
        compiled = compiled_of(kind, text)
        for point in probes:
            said = f'"{chr(point)}"' if kind == "pattern" else chr(point)
            expected = negated is not (low <= point <= high)
            assert takes(compiled, said) is expected, (text, hex(point))


def compiled_of(kind: str, text: str) -> CompiledGrammar:
    if kind == "pattern":
        return compiler().compile_json_schema(json.dumps({"type": "string", "pattern": text}))
    if kind == "ebnf":
        return compiler().compile_grammar(f"root ::= {text} # [a-\n")
    return compiler().compile_regex(text)


def in_a_tag(kind: str, text: str) -> str:
    schema = {"type": "string", "pattern": text}
    content = {
        "regex": {"type": "regex", "pattern": text},
        "ebnf": {"type": "grammar", "grammar": f"root ::= {text}"},
        "pattern": {"type": "json_schema", "json_schema": schema},
        "key": {"type": "json_schema", "json_schema": {"patternProperties": {text: True}}},
    }[kind]
    return json.dumps({"type": "structural_tag", "format": content})


@pytest.mark.parametrize("kind", ["regex", "ebnf", "pattern"])
def test_classes_in_a_structural_tag(kind: str) -> None:
    quote = '"' * (kind == "pattern")
    compiled = compiler().compile_structural_tag(in_a_tag(kind, "[가-힣^]"))
    assert all(takes(compiled, f"{quote}{one}{quote}") for one in "가나한힣^")
    assert not any(takes(compiled, f"{quote}{one}{quote}") for one in "a漢\U0001f600")


def test_a_caret_in_a_class_negates_nothing() -> None:
    """Classes with a caret are printed by XGrammar as negations, and grammars with a bounded string
    are parsed from print."""
    tag = {
        "type": "sequence",
        "elements": [
            {"type": "regex", "pattern": r"[\^a]"},
            {"type": "json_schema", "json_schema": {"type": "string", "maxLength": 3}},
        ],
    }
    form = json.dumps({"type": "structural_tag", "format": tag})
    compiled = compiler().compile_structural_tag(form)
    assert [takes(compiled, f'{one}"x"') for one in "^ab"] == [True, True, False]


KEPT: list[tuple[str, str, str]] = [
    ("^a|b$", "a", "ab"),
    ("(^a|^b)c$", "bc", "xbc"),
    ("a(b$|c$)", "ac", "a"),
    ("^(?:a)(?<n>b)$", "ab", "a"),
    ("a*?b+?c??", "aabb", "c"),
    ("a{2}b{1,}c{0,2}", "aab", "ab"),
    (r"\d\D\w\W\s", "1aa- ", "aaa- "),
    (r"\S", "é", "\u00a0"),
    (r"[\S]", "é", "\u2003"),
    (r"[^\s]", "é", "\u3000"),
    (r"[^\W]", "a", "é"),
    (r"[^\d가]", "a", "가"),
    (r"[\u00e9\u{1f600}\xe8]", "😀", "ê"),
    (r"[a\-\]]", "]", "b"),
    (r"\u0041\x42\u{43}\/\.", "ABC/.", "ABC/x"),
    (r"\U0001f600", "😀", "U"),
    ("[^]", "x", ""),
    ('"', '"', "x"),
    ('a"+', 'a""', "a"),
    (r"\\", "\\", "x"),
    (r'["\\]+', '"\\', "x"),
    (r"[\^]*", "^^", "a"),
    ("[^é -1]", "2", " "),
    ("(a*b)?c?", "aab", "a"),
    (r"x(\-*\[)??", "x", "x-"),
    ("[\x7f가b-d]", "c", "\x06"),
    ("éa\x1fb", "éa\x1fb", "éa"),
    ("(?:a{1,}){1,2}(b{0,}c){1,}", "aabc", "bc"),
    ("[^a]{2}", "é\u2003", "ab"),
    (r"\S+", "é^", "a b"),
    (r"\n\t", "\n\t", "nt"),
    (r"\x01", "\x01", "1"),
    (r"\x41b[\x43d]", "AbC", "b"),
    ("[^\\x20-\U0010ffff]?a", "a", "éa"),
    (".", "é", "\n"),
]


@pytest.mark.parametrize("kind", ["regex", "pattern"])
@pytest.mark.parametrize(("text", "good", "bad"), KEPT)
def test_what_is_kept(kind: str, text: str, good: str, bad: str) -> None:
    compiled = compiled_of(kind, text)
    for one, expected in ((good, True), (bad, False)):
        said = json.dumps(one, ensure_ascii=False) if kind == "pattern" else one
        assert takes(compiled, said) is expected


LEFT_OUT: list[tuple[str, str]] = [
    ("^(?!a).*$", r"lookahead \(\?!"),
    ("^(?=.*[0-9]).{3}$", r"lookahead \(\?="),
    ("(?<=a)b", "lookbehind"),
    ("(?<!a)b", "lookbehind"),
    (r"(a|b)\1", "Backreference"),
    (r"(?<n>a)\k<n>", r"escape \\k"),
    (r"\ba", "Word boundary"),
    (r"a\B", "Word boundary"),
    ("(?i:a)", "Group modifier"),
    ("(?>a)", "Group modifier"),
    ("a*+", "possessive"),
    ("a{1,2}+", "possessive"),
    ("a**", "repeated quantifier"),
    ("a^b", "anchor"),
    ("a$b", "anchor"),
    ("x(a|^b)c", "anchor"),
    ("(a$|b)c", "anchor"),
    (r"\Aa", r"escape \\A"),
    (r"a\z", r"escape \\z"),
    (r"\p{L}", r"escape \\p"),
    (r"[\p{L}]", r"escape \\p"),
    (r"[\B]", r"escape \\B"),
    (r"\x{41}", r"escape \\x"),
    (r"\07", r"escape \\07"),
    (r"\Qa\E", r"escape \\Q"),
    ("[[:alpha:]]", "POSIX class"),
    (r"\ud83d\ude00", "surrogate"),
    (r"[\ud83d\ude00]", "surrogate"),
    ("[힣-가]", "reversed"),
    ("[^\\0-\U0010ffff]", "no character"),
]


@pytest.mark.parametrize("kind", ["regex", "pattern", "key", "tag"])
@pytest.mark.parametrize(("text", "said"), LEFT_OUT)
def test_what_is_not_kept_is_refused(kind: str, text: str, said: str) -> None:
    schema = {"type": "object", "patternProperties": {text: {"type": "integer"}}}
    asked: dict[str, Callable[[], CompiledGrammar]] = {
        "key": lambda: compiler().compile_json_schema(json.dumps(schema)),
        "tag": lambda: compiler().compile_structural_tag(in_a_tag("regex", text)),
    }
    with pytest.raises(RuntimeError, match=said):
        asked.get(kind, lambda: compiled_of(kind, text))()


def test_regular_expressions_in_ebnf_are_checked() -> None:
    with pytest.raises(RuntimeError, match="lookahead"):
        compiler().compile_grammar(r'root ::= Regex("a(?=b)")')
    strings = 'root ::= "[é-" ["(#] "[" # [é-z]\n'
    assert rewrite_ebnf(strings) == strings


def test_names_and_data_of_a_schema_are_no_patterns() -> None:
    properties = {"pattern": {"const": {"pattern": "(?=a)"}}, "enum": {"enum": ["(?=a)"]}}
    schema = {"type": "object", "properties": properties, "default": {"pattern": "(?=a)"}}
    compiler().compile_json_schema(json.dumps(schema))


def test_plain_expressions_stay_as_they_are() -> None:
    for text in (r"[^a]\d+[\w.-]*(x|y){2,4}", "^a$", "가나"):
        assert rewrite_regex(text) == text
        assert re.fullmatch("[가-힣]+", "한국")


ATOMS = [
    "a", "é", '"', r"\\", r"\n", ".", r"\d", r"\D", r"\s", r"\S", r"\W", "[가-힣]", "[^한]", "[^a]",
    '["b]', r"[\\^]", r"[\^]", r"[\s\S]", r"[^\n\W]", "(?:b|é)", "(a|)",
]  # fmt: skip
COUNTS = ["", "", "*", "+", "?", "{2}", "{1,2}", "+?"]


@pytest.mark.parametrize("seed", range(40))
def test_a_pattern_matches_json_of_what_it_matches_in_python(seed: int) -> None:
    """Holds for all combinations of atoms: XGrammar lets some of them match a bare quotation
    mark."""
    rng = random.Random(seed)
    parts = [rng.choice(ATOMS) + rng.choice(COUNTS) for _ in range(rng.randrange(1, 4))]
    text = "".join(parts) + "|a" * rng.randrange(2)
    compiled = compiled_of("pattern", text)
    in_python = re.compile(text, re.ASCII)
    for _ in range(200):
        said = '"' + "".join(rng.choices('ab1"\\\n né한漢^', k=rng.randrange(5))) + '"'
        if takes(compiled, said):
            assert in_python.fullmatch(json.loads(said)), (text, said)


def test_what_has_no_end_is_read_once() -> None:
    for text in ("[" * 60_000, '"' * 60_001, "(" * 60_000, "Regex(" * 10_000, "[^가" * 20_000):
        began_s = time.perf_counter()
        rewrite_ebnf(text)
        rewrite_regex(text)
        assert time.perf_counter() - began_s < 10


@pytest.mark.parametrize("text", [r"\"" * 500_000, '"' + r"\"" * 500_000, r'Regex("\"' * 100_000])
def test_a_string_without_an_end_is_read_once(text: str) -> None:
    """Exceeds the test's time limit if the text is read from each of its quotes."""
    assert rewrite_ebnf(text) == text


def test_names_beside_a_bounded_string_stay() -> None:
    r"""Names like "éa" are printed by XGrammar as "\xe9a", which it reads as one character."""
    schema = {
        "type": "object",
        "properties": {"éa": {"enum": ["éb1"]}, "s": {"type": "string", "maxLength": 3}},
        "required": ["éa", "s"],
    }
    compiled = compiler().compile_json_schema(json.dumps(schema), any_whitespace=False)
    assert takes(compiled, '{"éa": "éb1", "s": "x"}')
