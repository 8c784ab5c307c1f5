"""Sizes ("1GiB") and times ("500ms") as users write them."""

from __future__ import annotations

import re

from prism.errors import ConfigError

_SIZES = {"B": 1}
_SIZES |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)}
_SIZES |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def parse_size(text: str, key: str) -> int:
    """Bytes of a size such as "64KiB" or "1.5GB". Raises ConfigError naming `key`."""
    return int(_parse(text, key, _SIZES, "a size", "512MiB or 2GiB"))


def parse_time(text: str, key: str) -> float:
    """Seconds of a time such as "500ms" or "2s". Raises ConfigError naming `key`."""
    return _parse(text, key, _TIMES, "a time", "500ms or 2s")


def format_size(size_bytes: int) -> str:
    """The size in the largest binary unit that keeps it readable: 1536 -> "1.5KiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes >= _SIZES[unit]:
            return f"{size_bytes / _SIZES[unit]:.4g}{unit}"
    return f"{size_bytes}B"


def _parse(
    text: str, key: str, units: dict[str, float] | dict[str, int], what: str, e_g: str
) -> float:
    match = _QUANTITY.fullmatch(text)
    unit = match and next((u for u in units if u.lower() == match[2].lower()), None)
    if match is None or unit is None:
        raise ConfigError(
            f"{key}: {text!r} is not {what}; write a number and one of"
            f" {', '.join(units)}, such as {e_g}"
        )
    value = float(match[1]) * units[unit]
    if value <= 0:
        raise ConfigError(f"{key}: {text!r} must be more than 0, such as {e_g}")
    return value
