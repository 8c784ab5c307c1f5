"""Checks of arguments that come from users."""

from __future__ import annotations

from kvcached.errors import InvalidArgumentError

_MAX = 2**63 - 1


def positive(name: str, value: int) -> int:
    """`value` if it is an integer from 1 to 2^63 - 1."""
    return _in_range(name, value, 1)


def not_negative(name: str, value: int) -> int:
    """`value` if it is an integer from 0 to 2^63 - 1."""
    return _in_range(name, value, 0)


def _in_range(name: str, value: int, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgumentError(f"{name} must be an integer, not {type(value).__name__}")
    if not low <= value <= _MAX:
        raise InvalidArgumentError(f"{name} is {value}; it must be from {low} to 2^63 - 1")
    return value
