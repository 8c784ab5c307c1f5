"""A schema is tried before an engine compiles it; what its grammar would leave out is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from prism.engines.sglang.try_grammar import tried
from tests.sglang.models import LLAMA, path_of

pytestmark = pytest.mark.sglang

INTEGER = {"type": "integer"}
A = {"$defs": {"A": {"type": "object", "properties": {"x": INTEGER}}}}
KEPT: list[Any] = [
    True,
    {},
    {"type": "object"},
    {"type": "string", "enum": ["a"]},
    {"type": "number", "enum": [1, 2.5]},
    {"type": ["string", "null"], "enum": ["a", None]},
    {"const": {"type": "string", "pattern": "a", "maxLength": 3}, "type": "object"},
    {"$ref": "#/$defs/A", "title": "T", "default": {"x": 3}, **A},
    {"allOf": [{"$ref": "#/$defs/A"}], "description": "of pydantic", **A},
    {"type": "object", "oneOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": INTEGER}}], **A},
    {"type": ["object", "null"], "anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], **A},
    {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"}}}},
    {"properties": {"a": INTEGER}, "required": ["a"]},
    {"type": "object", "properties": {"required": INTEGER, "enum": INTEGER, "$ref": INTEGER}},
]
LEFT_OUT: list[tuple[Any, str]] = [
    ({"type": "object", "properties": {"a": INTEGER}, "required": ["a", "b"]}, "required names"),
    ({"type": "object", "required": ["b"]}, "required names 'b'"),
    ({"required": ["b"]}, "without a type"),
    ({"minimum": 5}, "minimum is not kept without a type"),
    ({"properties": {"q": INTEGER}, "allOf": [{"properties": {"r": INTEGER}}]}, "beside allOf"),
    ({"properties": {"a": {"allOf": [INTEGER, {"minimum": 5}]}}}, "allOf .*properties/a"),
    ({"properties": {"a": INTEGER}, "anyOf": [{"required": ["a"]}]}, "properties beside anyOf"),
    ({"type": "object", "oneOf": [{"required": ["a"]}]}, "type beside oneOf"),
    ({"$ref": "#/$defs/A", "minProperties": 1, **A}, r"minProperties beside \$ref"),
    ({"properties": {"a": {"$ref": "https://example.com/s.json"}}}, "only within the schema"),
    ({"$ref": "#z", "$defs": {"z": {"$anchor": "z", **INTEGER}}}, "only within the schema"),
    ({"type": "integer", "anyOf": [{"type": "boolean"}]}, "type beside anyOf"),
    ({"type": "integer", "enum": [True]}, "type beside enum"),
    ({"type": "string", "const": 1}, "type beside const"),
    ({"enum": ["a", "bb"], "maxLength": 1}, "maxLength beside enum"),
    ({"anyOf": []}, "empty"),
    ({"properties": {"k": {"anyOf": []}}, "required": ["k"]}, "empty"),
    ({"type": []}, "empty"),
    ({"properties": {"a": INTEGER}, "dependencies": {"a": ["b"]}}, "dependencies"),
    (
        {"properties": {"s": {"type": ["string", "null"], "pattern": "a", "maxLength": 3}}},
        "pattern",
    ),
    ({"type": "integer", "anyOf": [{"$ref": "#"}, {"type": "string"}]}, "type beside anyOf"),
    ({"$defs": {"A": {"enum": ["a"], "type": [{}]}}}, "no schema"),
    ({"$ref": "#"}, "no text matches"),
]


def error_of(kind: str, text: str) -> str:
    config = json.loads((path_of(LLAMA) / "config.json").read_text())
    asked = {"directory": str(path_of(LLAMA)), "vocab_size": config["vocab_size"]}
    return tried({**asked, "kind": kind, "text": text})


@pytest.mark.parametrize("schema", KEPT)
def test_what_is_kept_compiles(schema: Any) -> None:
    assert error_of("json", json.dumps(schema)) == ""


@pytest.mark.parametrize(("schema", "said"), LEFT_OUT)
def test_what_would_be_left_out_is_refused(schema: Any, said: str) -> None:
    assert re.search(said, error_of("json", json.dumps(schema)))


def test_a_grammar_without_texts_is_refused() -> None:
    assert error_of("ebnf", "root ::= root") == "no text matches it"
