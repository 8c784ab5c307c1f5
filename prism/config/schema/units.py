"""Sizes ("1GiB") and times ("500ms"), as text and as numbers."""

from __future__ import annotations

import math
import re
from typing import Any, Self

from prism.errors import ConfigError

_SIZES = {"B": 1}
_SIZES |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)}
_SIZES |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}
_SIZES |= {letter: 1024**power for power, letter in enumerate("KMGT", start=1)}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


class Bytes(int):
    """A size. `text` is the user's text."""

    text: str

    def __new__(cls, value: str | int) -> Self:
        """Raises ValueError for a text that is not a size above 0."""
        size = super().__new__(cls, _size(value) if isinstance(value, str) else value)
        size.text = value if isinstance(value, str) else f"{value}B"
        return size

    def __getnewargs__(self) -> tuple[str]:  # type: ignore[override]
        return (self.text,)


class Capacity(Bytes):
    """A size, or a part of a device's memory such as "90%". `share` is None for a size. `origin` is
    the text of the part that a size was computed from."""

    share: float | None
    origin: str

    def __new__(cls, value: str | int, origin: str = "") -> Self:
        """Raises ValueError for a text that is neither."""
        share = _share(value) if isinstance(value, str) and value.rstrip().endswith("%") else None
        made = super().__new__(cls, value if share is None else 0)
        made.share, made.origin = share, origin
        if share is not None:
            made.text = str(value)
        return made


class Seconds(float):
    """A time. `text` is the user's text."""

    text: str

    def __new__(cls, value: str | float) -> Self:
        """Raises ValueError for a text that is not a time above 0."""
        time = super().__new__(cls, _time(value) if isinstance(value, str) else value)
        time.text = value if isinstance(value, str) else f"{value!r}".removesuffix(".0") + "s"
        return time

    def __getnewargs__(self) -> tuple[str]:  # type: ignore[override]
        return (self.text,)


_EXAMPLES = {Bytes: "1GiB", Capacity: '8GiB" or "90%', Seconds: "500ms"}


def decoded(kind: type[Any], value: object) -> Any:
    """Decodes sizes and times of the YAML, as msgspec's `dec_hook`. Raises TypeError and
    ValueError, which msgspec reports with the key."""
    if kind not in _EXAMPLES:
        raise NotImplementedError(kind)
    if not isinstance(value, str):
        found = f"got `{type(value).__name__}`; write it as"
        raise TypeError(f'expected `str`, {found} "{_EXAMPLES[kind]}"')
    return kind(value)


def encoded(value: object) -> str:
    """Encodes sizes and times, as msgspec's `enc_hook`, to the text that `decoded` reads."""
    if not isinstance(value, Bytes | Seconds):
        raise NotImplementedError(type(value))
    return value.text


def parse_size(text: str, key: str) -> int:
    """Returns the bytes of a size such as "64KiB" or "1.5GB". Raises ConfigError that names
    `key`."""
    try:
        return _size(text)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error


def parse_time(text: str, key: str) -> float:
    """Returns the seconds of a time such as "500ms" or "2s". Raises ConfigError that names
    `key`."""
    try:
        return _time(text)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error


def format_size(size_bytes: int) -> str:
    """Returns the size in the largest binary unit that keeps it readable: 1536 -> "1.5KiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(size_bytes) >= _SIZES[unit]:
            return f"{size_bytes / _SIZES[unit]:.4g}{unit}"
    return f"{size_bytes}B"


def whole_mib(size_bytes: int) -> str:
    """Returns a size to copy into the YAML, never rounded down."""
    return f"{-(-size_bytes // 2**20)}MiB"


def _size(text: str) -> int:
    return int(_parse(text, _SIZES, "a size", "512MiB or 2GiB"))


def _share(text: str) -> float:
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise ValueError(f"{text!r} is not a part of the memory; write more than 0% to 100%")
    return share


def _time(text: str) -> float:
    return _parse(text, _TIMES, "a time", "500ms or 2s")


def _parse(text: str, units: dict[str, float] | dict[str, int], what: str, example: str) -> float:
    match = _QUANTITY.fullmatch(text)
    unit = match and next((u for u in units if u.lower() == match[2].lower()), None)
    if match is None or unit is None:
        known = ", ".join(units)
        raise ValueError(
            f"{text!r} is not {what}; write a number and one of {known}, such as {example}"
        )
    value = float(match[1]) * units[unit]
    if not 0 < value < math.inf:
        least = "must be more than 0" if value <= 0 else "is out of range"
        raise ValueError(f"{text!r} {least}, such as {example}")
    return value
