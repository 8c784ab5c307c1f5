"""Reads the user's YAML into `ServeYaml`. Every mistake becomes one line that names the key."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from prism.config.schema.cluster_config import ServeYaml
from prism.config.schema.units import decoded
from prism.errors import ConfigError

_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_MISSING = re.compile(r"Object missing required field `(.*)`")


# Maximum number of values of a file, with the repetitions by aliases.
_VALUES_MAX = 1_000_000


class _Loader(yaml.SafeLoader):
    """YAML loader that rejects repeated keys, of which YAML keeps the last one silently, and nested
    aliases that would repeat a value a billion times."""

    def construct_document(self, node: yaml.Node) -> Any:
        _count(node, {})
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {name!r} is given twice", key.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Returns the number of values that `node` expands to.

    Args:
        known: Values of counted nodes by id. A node that is being counted has more than
            _VALUES_MAX, since it contains itself.
    """
    if id(node) not in known:
        known[id(node)] = _VALUES_MAX
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(_count(part, known) for part in parts)
    if known[id(node)] > _VALUES_MAX:
        raise yaml.constructor.ConstructorError(
            None, None, f"aliases expand it to more than {_VALUES_MAX} values", node.start_mark
        )
    return known[id(node)]


T = TypeVar("T", bound=msgspec.Struct)


def read_yaml(path: Path) -> ServeYaml:
    """Returns the file of prism-serve. Raises ConfigError (one line; no path prefix)."""
    return convert(read_mapping(path), ServeYaml)


def read_mapping(
    path: Path, keys: str = "devices: and models:", remedy: str = "correct the path"
) -> dict[str, Any]:
    """Returns the file's contents. Raises ConfigError (one line).

    Args:
        path: The file.
        keys: Keys to name if the file does not have any.
        remedy: Remedy to name if the file cannot be read.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {_reason(error)}; {remedy}") from error
    data = parse(text)
    if not isinstance(data, dict):
        raise ConfigError(f"the file must have keys such as {keys}; see the README")
    return data


def parse(text: str) -> Any:
    """Returns the value of a YAML text. Raises ConfigError (one line)."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(_yaml_message(error)) from error
    except RecursionError as error:
        raise ConfigError("values are nested too deeply; correct the YAML") from error
    except ValueError as error:  # a value that looks like a date and is invalid
        raise ConfigError(f"a value cannot be read: {error}; correct or quote it") from error


def convert(data: Any, kind: type[T], under: str = "", *, finite: bool = True) -> T:
    """Returns `data` as a `kind`. Raises ConfigError (one line) that names the key.

    Args:
        data: Value to check.
        kind: Struct to convert to.
        under: Key of `data`. Empty: it is the whole file.
        finite: True if nan and inf are rejected.
    """
    try:
        if finite:
            _check_finite(data, under)
        return msgspec.convert(data, kind, dec_hook=decoded)
    except msgspec.ValidationError as error:
        text = str(error)
        if " - at `key` in `$" in text:
            wrong = next(key for key, name, _ in _inside(data, under) if not isinstance(name, str))
            raise ConfigError(f"{wrong}: a key must be text; correct or quote it") from error
        raise ConfigError(_conversion_message(text, kind, under)) from error
    except RecursionError as error:
        raise ConfigError("values are nested too deeply; correct the YAML") from error


def _check_finite(data: Any, under: str) -> None:
    """Raises ConfigError for nan and inf. Range checks do not detect nan."""
    for key, _, value in _inside(data, under):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}: {value} is not a finite number; correct the value")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message on an unknown name: "did you mean ...?", or "" if no known name
    is similar."""
    close = difflib.get_close_matches(name, [*known], n=1)
    return f"did you mean {close[0]!r}?" if close else ""


def _inside(data: Any, under: str) -> Iterator[tuple[str, Any, Any]]:
    """Yields (whole key, its last part, value) of everything in `data`."""
    parts: list[tuple[str, Any, Any]] = []
    if isinstance(data, dict):
        parts = [(_join(under, str(name)), name, part) for name, part in data.items()]
    elif isinstance(data, list | tuple):
        parts = [(f"{under}[{number}]", "", part) for number, part in enumerate(data)]
    for part in parts:
        yield part
        yield from _inside(part[2], part[0])


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "not UTF-8 text"


def _yaml_message(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{where}{problem}; correct the YAML there"


def _conversion_message(text: str, kind: type[msgspec.Struct], under: str) -> str:
    problem, _, at = text.partition(" - at `$")
    inside = at.rstrip("`").lstrip(".")
    where = _join(under, inside) if inside else under
    if match := _UNKNOWN.fullmatch(problem):
        return f"{_join(where, match[1])}: unknown key; {_known_keys(match[1], inside, kind)}"
    if match := _MISSING.fullmatch(problem):
        return f"{_join(where, match[1])}: is missing; add it"
    hint = "; correct the value" if problem[:1].isupper() else ""  # own messages have a remedy
    return f"{where}: {problem[:1].lower()}{problem[1:]}{hint}"


def _known_keys(name: str, where: str, root: type[msgspec.Struct]) -> str:
    known = [field.encode_name for field in msgspec.structs.fields(_struct_at(where, root))]
    return suggestion(name, known) or f"known keys: {', '.join(known)}"


def _struct_at(where: str, root: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Returns the struct at a path such as "models[0].slo"."""
    kind: Any = root
    for name in re.findall(r"[A-Za-z_]\w*", where):
        fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
        kind = getattr(fields[name], "__args__", (fields[name],))[0]
    return kind  # type: ignore[no-any-return]


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
