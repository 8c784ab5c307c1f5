"""JSON schemas by number, with everything that structured output supports."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
_PLAIN: list[Schema] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer", "minimum": -20, "maximum": 300},
    {"type": "integer", "exclusiveMinimum": 0, "maximum": 9},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"enum": ["red", 'a "quoted" word', 7, None, True]},
    {"const": {"fixed": [1, "two"]}},
    {"type": "string", "maxLength": 12},
    {"type": "string", "minLength": 3, "maxLength": 40},
    {"type": "string", "minLength": 5, "maxLength": 5},
    {"type": ["string", "null"], "minLength": 1, "maxLength": 9},
    {"type": ["integer", "boolean"], "minimum": 3, "maximum": 5},
    {"type": "string", "pattern": "^[a-z]{2,6}-[0-9]+$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"$ref": "#/$defs/short"},
]


def schema(number: int) -> Schema:
    """Returns the same schema for the same number: an object with one to four properties."""
    draw = random.Random(number)
    made = _object(draw, depth=2)
    return made | {"$defs": {"short": {"type": "string", "minLength": 1, "maxLength": 4}}}


def _any(draw: random.Random, depth: int) -> Schema:
    compound = (_object, _array, _tuple, _either)
    return (
        draw.choice(compound)(draw, depth - 1)
        if depth and draw.random() < 0.5
        else draw.choice(_PLAIN)
    )


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(["a", "b c", 'd"e', "ünï", "key_with_a_long_name"], draw.randint(1, 4))
    properties = {name: _any(draw, depth) for name in names}
    required = [name for name in names if draw.random() < 0.8]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 2)
    bounds = {"minItems": least, "maxItems": least + draw.randint(0, 2)}
    return {"type": "array", "items": _any(draw, depth), **bounds}


def _tuple(draw: random.Random, depth: int) -> Schema:
    parts = [_any(draw, depth) for _ in range(draw.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _either(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(draw, depth) for _ in range(draw.randint(2, 3))]}
