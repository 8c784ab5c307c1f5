"""What XGrammar does not keep of a JSON schema, beyond SGLang's own list: the answer would end in
order and not be valid."""

from __future__ import annotations

from typing import Any

from prism.engines.sglang.regexes import kept_ebnf, kept_regex

# The first of these that a schema has is what XGrammar keeps to, and to nothing beside it.
_LEADING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
# From these it takes the type where none is given.
_TELLING = {
    "additionalProperties": "object", "items": "array", "prefixItems": "array",
    "properties": "object", "unevaluatedItems": "array", "unevaluatedProperties": "object",
}  # fmt: skip
# Without a type it keeps to none of these.
_BOUNDS = {
    "exclusiveMaximum", "exclusiveMinimum", "maxItems", "maxLength", "maxProperties", "maximum",
    "minItems", "minLength", "minProperties", "minimum", "pattern", "patternProperties",
    "propertyNames", "required",
}  # fmt: skip
_CONSTRAINTS = {*_LEADING, *_TELLING, *_BOUNDS}
_TYPES = {
    str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array",
    type(None): "null",
}  # fmt: skip
# Their keys are names, and not keywords.
_MAPS = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
# Their values are data.
_DATA = {"const", "default", "enum", "examples"}


def kept_patterns(part: Any) -> Any:
    """Returns a schema or structural tag with each regular expression and EBNF text as XGrammar has
    to be given it. Raises RuntimeError for one that XGrammar would not keep to."""
    if isinstance(part, list):
        return [kept_patterns(each) for each in part]
    if not isinstance(part, dict):
        return part
    return {name: _kept_value(name, value, part.get("type")) for name, value in part.items()}


def _kept_value(name: str, value: Any, kind: Any) -> Any:
    if name in _MAPS and isinstance(value, dict):
        regexes = name == "patternProperties"
        return {
            kept_regex(key, json_string=True) if regexes else key: kept_patterns(each)
            for key, each in value.items()
        }
    if name == "pattern" and isinstance(value, str):
        return kept_regex(value, json_string=kind != "regex")
    if name == "grammar" and kind == "grammar" and isinstance(value, str):
        return kept_ebnf(value)
    return value if name in _DATA else kept_patterns(value)


def unkept(part: dict[str, Any], schema: Any) -> str:
    """What is not kept of this part of a schema that compiles, and what to change; empty:
    nothing."""
    if "dependencies" in part:
        return "dependencies are not kept; remove them"
    if any(part.get(name) == [] for name in ("type", *_LEADING)):
        return "a list is empty"
    lead = next((name for name in _LEADING if name in part), None)
    beside = sorted(name for name in part if name in _CONSTRAINTS - {lead})
    if lead is not None:
        return _unkept_beside(lead, beside, part, schema)
    if "type" not in part and beside and not _TELLING.keys() & part.keys():
        return f"{beside[0]} is not kept without a type; add the type"
    return _unkept_names(part)


def _unkept_beside(lead: str, beside: list[str], part: dict[str, Any], schema: Any) -> str:
    value = part[lead]
    if beside:
        return f"{beside[0]} beside {lead} is not kept; leave one of them"
    if lead == "$ref" and value != "#" and not str(value).startswith("#/"):
        return "a $ref is followed only within the schema, as #/$defs/name"
    if lead == "allOf" and len(value) > 1:
        return "several schemas of allOf are not kept together; merge them into one"
    types = _listed(part.get("type", []))
    if "number" in types:
        types.add("integer")
    if types and not _types(part, schema, set()) <= types:
        return f"the type beside {lead} is not kept, and {lead} allows others; leave one of them"
    return ""


def _unkept_names(part: dict[str, Any]) -> str:
    known = part.get("properties", {})
    missing = [name for name in part.get("required", []) if name not in known]
    return f"required names {missing[0]!r:.80}, which properties lacks; add it" if missing else ""


def _types(part: Any, schema: Any, seen: set[int]) -> set[str]:
    """Of the values that XGrammar allows; "any" where nothing says it. seen: parts that are
    counted, which may name each other."""
    if not isinstance(part, dict):
        return {"any"}
    if id(part) in seen:
        return set()
    seen.add(id(part))
    if "$ref" in part:
        return _types(_named(str(part["$ref"]), schema), schema, seen)
    if "const" in part or "enum" in part:
        values = [part["const"]] if "const" in part else part["enum"]
        return {_TYPES[type(value)] for value in values}
    parts = next((part[name] for name in ("anyOf", "oneOf", "allOf") if name in part), None)
    if parts is not None:
        return {kind for each in parts for kind in _types(each, schema, seen)}
    told = {kind for name, kind in _TELLING.items() if name in part}
    return _listed(part.get("type", [])) or told or {"any"}


def _listed(types: Any) -> set[str]:
    return set(types if isinstance(types, list) else [types])


def _named(ref: str, schema: Any) -> Any:
    for name in filter(None, ref.removeprefix("#").split("/")):
        schema = schema.get(name) if isinstance(schema, dict) else None
    return schema
