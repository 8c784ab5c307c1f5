"""Parts of JSON schemas that XGrammar does not enforce, in addition to SGLang's own list.

An answer to such a schema would finish normally but might not be valid.
"""

from __future__ import annotations

from typing import Any

from prism.engines.sglang.grammars.regexes import rewrite_ebnf, rewrite_regex

# XGrammar enforces the first of these keywords that a schema has, and no other keyword next to it.
_LEADING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
# Keywords that imply the type of a schema without `type`.
_IMPLIED_TYPES = {
    "additionalProperties": "object", "items": "array", "prefixItems": "array",
    "properties": "object", "unevaluatedItems": "array", "unevaluatedProperties": "object",
}  # fmt: skip
# Keywords that XGrammar does not enforce without a type.
_BOUNDS = {
    "exclusiveMaximum", "exclusiveMinimum", "maxItems", "maxLength", "maxProperties", "maximum",
    "minItems", "minLength", "minProperties", "minimum", "pattern", "patternProperties",
    "propertyNames", "required",
}  # fmt: skip
_CONSTRAINTS = {*_LEADING, *_IMPLIED_TYPES, *_BOUNDS}
_TYPES = {
    str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array",
    type(None): "null",
}  # fmt: skip
# Keywords whose values have names as keys, not keywords.
_MAPS = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
# Keywords whose values are data.
_DATA = {"const", "default", "enum", "examples"}


def rewrite_patterns(part: Any) -> Any:
    """Returns a schema or structural tag with all regular expressions and EBNF texts rewritten for
    XGrammar. Raises RuntimeError for one that XGrammar would not enforce."""
    if isinstance(part, list):
        return [rewrite_patterns(each) for each in part]
    if not isinstance(part, dict):
        return part
    return {name: _rewrite_value(name, value, part.get("type")) for name, value in part.items()}


def _rewrite_value(name: str, value: Any, kind: Any) -> Any:
    if name in _MAPS and isinstance(value, dict):
        regexes = name == "patternProperties"
        return {
            rewrite_regex(key, json_string=True) if regexes else key: rewrite_patterns(each)
            for key, each in value.items()
        }
    if name == "pattern" and isinstance(value, str):
        return rewrite_regex(value, json_string=kind != "regex")
    if name == "grammar" and kind == "grammar" and isinstance(value, str):
        return rewrite_ebnf(value)
    return value if name in _DATA else rewrite_patterns(value)


def unenforced(part: dict[str, Any], schema: Any) -> str:
    """Returns what XGrammar does not enforce in this part of a schema that compiles, and what to
    change; empty if it enforces all."""
    if "dependencies" in part:
        return "dependencies are not enforced; remove them"
    if any(part.get(name) == [] for name in ("type", *_LEADING)):
        return "a list is empty"
    lead = next((name for name in _LEADING if name in part), None)
    others = sorted(name for name in part if name in _CONSTRAINTS - {lead})
    if lead is not None:
        return _unenforced_next_to(lead, others, part, schema)
    if "type" not in part and others and not _IMPLIED_TYPES.keys() & part.keys():
        return f"{others[0]} is not enforced without a type; add the type"
    return _unenforced_names(part)


def _unenforced_next_to(lead: str, others: list[str], part: dict[str, Any], schema: Any) -> str:
    value = part[lead]
    if others:
        return f"{others[0]} is not enforced next to {lead}; remove one of them"
    if lead == "$ref" and value != "#" and not str(value).startswith("#/"):
        return "a $ref must point into the schema itself, as #/$defs/name"
    if lead == "allOf" and len(value) > 1:
        return "several schemas of allOf are not enforced together; merge them into one"
    types = _listed(part.get("type", []))
    if "number" in types:
        types.add("integer")
    if types and not _types(part, schema, set()) <= types:
        return f"type is not enforced next to {lead}, which allows other types; remove one of them"
    return ""


def _unenforced_names(part: dict[str, Any]) -> str:
    known = part.get("properties", {})
    missing = [name for name in part.get("required", []) if name not in known]
    return f"required names {missing[0]!r:.80}, which properties lacks; add it" if missing else ""


def _types(part: Any, schema: Any, seen: set[int]) -> set[str]:
    """Returns the types of the values that XGrammar allows, "any" if they are not restricted.

    Args:
        seen: ids of visited parts, since parts may refer to each other.
    """
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
    implied = {kind for name, kind in _IMPLIED_TYPES.items() if name in part}
    return _listed(part.get("type", [])) or implied or {"any"}


def _listed(types: Any) -> set[str]:
    return set(types if isinstance(types, list) else [types])


def _named(ref: str, schema: Any) -> Any:
    for name in filter(None, ref.removeprefix("#").split("/")):
        schema = schema.get(name) if isinstance(schema, dict) else None
    return schema
