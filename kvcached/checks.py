"""Checks of arguments that come from users."""

from __future__ import annotations

from operator import index

from kvcached.errors import InvalidArgumentError

_MAX = 2**63 - 1
_DAY_S = 86400


def positive(name: str, value: int) -> int:
    """`value` if it is an integer from 1 to 2^63 - 1."""
    return _in_range(name, value, 1)


def not_negative(name: str, value: int) -> int:
    """`value` if it is an integer from 0 to 2^63 - 1."""
    return _in_range(name, value, 0)


def process_id(name: str, value: int) -> int:
    """`value` if it can be a process id."""
    return _in_range(name, value, 1, 2**31 - 1)


def patience(name: str, value: float) -> float:
    """`value` if it is a number of seconds from 0 to a day."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgumentError(f"{name} must be a number, not {type(value).__name__}")
    if not 0 <= value <= _DAY_S:
        raise InvalidArgumentError(f"{name} is {value}; it must be from 0 to {_DAY_S} seconds")
    return value


def _in_range(name: str, value: int, low: int, high: int = _MAX) -> int:
    try:
        number = index(value)  # numpy's integers too
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise InvalidArgumentError(f"{name} must be an integer, not {type(value).__name__}")
    if not low <= number <= high:
        bound = f"2^{(high + 1).bit_length() - 1} - 1"
        raise InvalidArgumentError(f"{name} is {number}; it must be from {low} to {bound}")
    return number
