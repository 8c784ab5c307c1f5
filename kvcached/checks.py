"""Checks of arguments that come from users.

A rule takes an argument's name and value, and returns the value or raises InvalidArgumentError.
`checked` applies rules to a function's arguments; a dataclass calls them in `__post_init__`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from operator import index
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from kvcached.errors import InvalidArgumentError

P = ParamSpec("P")
R = TypeVar("R")
Rule = Callable[[str, Any], Any]

MAX_BYTES = 2**63 - 1
_DAY_S = 86400
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,64}")


def checked(**rules: Rule) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Applies each rule to the argument of the same name. A parameter's default always passes.

    Costs about a microsecond per call, so hot paths do not use it.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = signature(function).parameters
        names = list(parameters)

        def apply(name: str, value: object) -> Any:
            rule = rules.get(name)
            return value if rule is None or value is parameters[name].default else rule(name, value)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            given: Any = list(map(apply, names, args)) + list(args[len(names) :])
            named: Any = {name: apply(name, value) for name, value in kwargs.items()}
            return function(*given, **named)

        return call

    return decorate


def positive(name: str, value: int) -> int:
    """Returns `value` if it is an integer from 1 to 2^63 - 1."""
    return _in_range(name, value, 1)


def not_negative(name: str, value: int) -> int:
    """Returns `value` if it is an integer from 0 to 2^63 - 1."""
    return _in_range(name, value, 0)


def process_id(name: str, value: int) -> int:
    """Returns `value` if it can be a process id."""
    return _in_range(name, value, 1, 2**31 - 1)


def duration(name: str, value: float) -> float:
    """Returns `value` if it is a number of seconds from 0 to one day."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgumentError(f"{name} must be a number, not {type(value).__name__}")
    if not 0 <= value <= _DAY_S:
        raise InvalidArgumentError(
            f"{name} is {shown(value)}; it must be from 0 to {_DAY_S} seconds"
        )
    return value


def text(name: str, value: str) -> str:
    """Returns `value` if it is a string that the OS accepts."""
    instance_of(str)(name, value)
    if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidArgumentError(f"{name} {value!r} contains characters that are not allowed")
    return value


def path(name: str, value: str | Path) -> Path:
    """Returns `value` as a Path."""
    instance_of(str, Path)(name, value)
    return Path(text(name, str(value)))


def namespace_name(name: str, value: str) -> str:
    """Returns `value` if it is a valid namespace."""
    if not _NAMESPACE.fullmatch(text(name, value)):
        raise InvalidArgumentError(
            f"namespace {value!r} must be 1 to 64 letters, digits, '.', '_' or '-'"
        )
    return value


def flag(name: str, value: bool) -> bool:
    """Returns `value` if it is True or False."""
    instance_of(bool)(name, value)
    return value


def function(name: str, value: Callable[P, R]) -> Callable[P, R]:
    """Returns `value` if it is callable."""
    if not callable(value):
        raise InvalidArgumentError(f"{name} must be a function, not {type(value).__name__}")
    return value


def instance_of(*kinds: type) -> Rule:
    """Accepts objects of these classes."""

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise InvalidArgumentError(f"{name} must be a {wanted}, not {type(value).__name__}")
        return value

    return check


def has(*methods: str) -> Rule:
    """Accepts objects with these methods."""

    def check(name: str, value: Any) -> Any:
        for method in methods:
            if not callable(getattr(value, method, None)):
                kind = type(value).__name__
                raise InvalidArgumentError(f"{name} must have {method}(); {kind} does not")
        return value

    return check


def up_to(high: int) -> Rule:
    """Accepts integers from 1 to `high`, which is a power of two less 1."""
    return lambda name, value: _in_range(name, value, 1, high)


def optional(rule: Rule) -> Rule:
    """Accepts None in addition to what `rule` accepts."""
    return lambda name, value: None if value is None else rule(name, value)


def each(rule: Rule) -> Rule:
    """Accepts non-string sequences whose items `rule` accepts, and returns them as a list."""

    def check(name: str, value: Any) -> list[Any]:
        if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
            raise InvalidArgumentError(f"{name} must be a sequence, not {type(value).__name__}")
        return [rule(name, item) for item in value]

    return check


def by_name(rule: Rule) -> Rule:
    """Accepts mappings from strings to values that `rule` accepts."""

    def check(name: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
        for key, item in instance_of(Mapping)(name, value).items():
            rule(f"{name}[{text(name, key)!r}]", item)
        return value

    return check


def shown(value: object) -> str:
    """Returns the repr of `value`, shortened for integers too long for Python to print."""
    is_huge = isinstance(value, int) and value.bit_length() > 128
    return "a huge integer" if is_huge else repr(value)


def _in_range(name: str, value: int, low: int, high: int = MAX_BYTES) -> int:
    try:
        number = index(value)  # accepts numpy's integers
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise InvalidArgumentError(f"{name} must be an integer, not {type(value).__name__}")
    if not low <= number <= high:
        bound = f"2^{(high + 1).bit_length() - 1} - 1"
        raise InvalidArgumentError(f"{name} is {shown(number)}; it must be from {low} to {bound}")
    return number


threads = up_to(2**10 - 1)
