"""Sizes in the form that people write."""

from __future__ import annotations

import re

from kvcached.errors import InvalidArgumentError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_FACTORS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _FACTORS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def parse_size(text: str) -> int:
    """Returns the bytes of "512MiB", "1.5GiB", "2G" (binary too), "4MB" (decimal) or "4096".

    Raises InvalidArgumentError, also if this is not a whole number of bytes.
    """
    match = re.fullmatch(r"\s*(\d+)(?:\.(\d+))?\s*([a-z]*)\s*", text.lower())
    if match is None or match[3] not in _FACTORS:
        raise InvalidArgumentError(
            f"size {text!r} is not valid; write 512MiB, 1.5GiB or a number of bytes"
        )
    decimals = match[2] or ""
    scale = int(10 ** len(decimals))
    size_bytes, rest = divmod(int(match[1] + decimals) * _FACTORS[match[3]], scale)
    if rest:
        raise InvalidArgumentError(f"size {text!r} is not a whole number of bytes")
    return size_bytes


def format_size(size_bytes: int) -> str:
    """Returns a size in the largest unit that gives at least 1: "512 MiB", "1.5 GiB"."""
    power = min(max(size_bytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    value = f"{size_bytes / 1024**power:.1f}".removesuffix(".0")
    return f"{value} {_UNITS[power]}"
