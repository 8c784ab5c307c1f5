"""Schemas that a grammar would not enforce are rejected before an engine compiles them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from prism.engines.sglang.grammars.try_grammar import grammar_error
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
    ({"minimum": 5}, "minimum is not enforced without a type"),
    ({"properties": {"q": INTEGER}, "allOf": [{"properties": {"r": INTEGER}}]}, "next to allOf"),
    ({"properties": {"a": {"allOf": [INTEGER, {"minimum": 5}]}}}, "allOf .*properties/a"),
    (
        {"properties": {"a": INTEGER}, "anyOf": [{"required": ["a"]}]},
        "properties is not enforced next to anyOf",
    ),
    ({"type": "object", "oneOf": [{"required": ["a"]}]}, "type is not enforced next to oneOf"),
    (
        {"$ref": "#/$defs/A", "minProperties": 1, **A},
        r"minProperties is not enforced next to \$ref",
    ),
    ({"properties": {"a": {"$ref": "https://example.com/s.json"}}}, "into the schema itself"),
    ({"$ref": "#z", "$defs": {"z": {"$anchor": "z", **INTEGER}}}, "into the schema itself"),
    ({"type": "integer", "anyOf": [{"type": "boolean"}]}, "type is not enforced next to anyOf"),
    ({"type": "integer", "enum": [True]}, "type is not enforced next to enum"),
    ({"type": "string", "const": 1}, "type is not enforced next to const"),
    ({"enum": ["a", "bb"], "maxLength": 1}, "maxLength is not enforced next to enum"),
    ({"anyOf": []}, "empty"),
    ({"properties": {"k": {"anyOf": []}}, "required": ["k"]}, "empty"),
    ({"type": []}, "empty"),
    ({"properties": {"a": INTEGER}, "dependencies": {"a": ["b"]}}, "dependencies"),
    (
        {"properties": {"s": {"type": ["string", "null"], "pattern": "a", "maxLength": 3}}},
        "pattern",
    ),
    (
        {"type": "integer", "anyOf": [{"$ref": "#"}, {"type": "string"}]},
        "type is not enforced next to anyOf",
    ),
    ({"$defs": {"A": {"enum": ["a"], "type": [{}]}}}, "this is not a schema"),
    ({"$ref": "#"}, "no text matches"),
]


def error_of(kind: str, text: str) -> str:
    config = json.loads((path_of(LLAMA) / "config.json").read_text())
    asked = {"directory": str(path_of(LLAMA)), "vocab_size": config["vocab_size"]}
    return grammar_error({**asked, "kind": kind, "text": text})


@pytest.mark.parametrize("schema", KEPT)
def test_what_is_kept_compiles(schema: Any) -> None:
    assert error_of("json", json.dumps(schema)) == ""


@pytest.mark.parametrize(("schema", "said"), LEFT_OUT)
def test_what_would_be_left_out_is_refused(schema: Any, said: str) -> None:
    assert re.search(said, error_of("json", json.dumps(schema)))


def test_a_grammar_without_texts_is_refused() -> None:
    assert error_of("ebnf", "root ::= root") == "no text matches it"
