"""Keys of a config.json, with the defaults of its family."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from kvcached.errors import InvalidArgumentError

_MOST = 2**31 - 1
_LAYERS_MAX = 2**16 - 1
# Values with which a key changes nothing. One expert is none.
_NEUTRAL: tuple[Any, ...] = (None, False, 0, 1, [], {}, "")


def shown(value: object) -> str:
    """Returns a value as a config.json has it, shortened."""
    try:
        return f"{json.dumps(value, default=repr):.60}"
    except ValueError:  # an integer with too many digits
        return "a huge number"


def wrong(name: str, value: object, expected: str) -> InvalidArgumentError:
    """Returns the error for a key whose value is not what is `expected`."""
    return InvalidArgumentError(
        f"config.json has {name} {shown(value)}, which is not {expected}; correct the file"
    )


def check_length(name: str, listed: Sized, layers: int) -> None:
    """Raises InvalidArgumentError unless the key lists one value for each layer."""
    if len(listed) != layers:
        raise InvalidArgumentError(
            f"config.json has {len(listed)} {name} for {layers} layers; correct one of them"
        )


class ConfigKeys:
    """Values of a config.json. A key that the file lacks has the family's default, if there is one.

    The methods raise InvalidArgumentError with the key if a value is missing or has another type.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values = values
        self._defaults = defaults
        self._read: set[str] = set()

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigKeys:
        """Returns the same values with these defaults in addition."""
        return ConfigKeys(self._values, {**self._defaults, **defaults})

    def get(self, name: str) -> Any:
        """Returns the value as it is. A null stays null, whatever the default."""
        self._read.add(name)
        return self._values[name] if name in self._values else self._defaults.get(name)

    def if_null(self, name: str, meaning: int) -> int | None:
        """Returns what a null means, or None for a key that neither the file nor the family has."""
        return meaning if name in self._values or name in self._defaults else None

    def unread(self, names: Sequence[str]) -> str:
        """Returns the first of these keys that has a value that no reader asked for, or ""."""
        left = (name for name in names if name not in self._read)
        return next((name for name in left if self._values.get(name) not in _NEUTRAL), "")

    def layers(self, *names: str) -> int:
        """Returns the first of these keys that has a value: a number of layers."""
        value = self.integer(*names)
        if value > _LAYERS_MAX:
            raise self._wrong(names[0], f"a number of layers, at most {_LAYERS_MAX}")
        return value

    def integer(self, *names: str, default: int | None = None) -> int:
        """Returns the first of these keys that has a value. It must be positive."""
        return self._whole(names, 1, default)

    def count(self, *names: str, default: int | None = None) -> int:
        """Returns the first of these keys that has a value. It must not be negative."""
        return self._whole(names, 0, default)

    def optional(self, name: str) -> int | None:
        """Returns a positive integer, or None."""
        return None if self.get(name) is None else self.integer(name)

    def number(self, name: str) -> float:
        """Returns a positive number."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST:
            raise self._wrong(name, "a positive number")
        return value

    def flag(self, name: str) -> bool:
        """Returns a boolean. A missing one without a default is False."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return bool(value)

    def texts(self, name: str) -> Sequence[str] | None:
        """Returns a list of strings, or None."""
        listed: Sequence[str] | None = self._list(name, str, "a list of strings")
        return listed

    def integers(self, name: str) -> Sequence[int] | None:
        """Returns a list of integers, or None."""
        expected = "a list of whole numbers of at least 0"
        listed: Sequence[int] | None = self._list(name, int, expected)
        if listed is not None and not all(0 <= value <= _MOST for value in listed):
            raise self._wrong(name, expected)
        return listed

    def objects(self, name: str) -> Sequence[Mapping[str, Any]] | None:
        """Returns a list of objects, or None."""
        listed: Sequence[Mapping[str, Any]] | None = self._list(name, Mapping, "a list of objects")
        return listed

    def by_layer(self, name: str) -> Mapping[int, Mapping[str, Any]] | None:
        """Returns an object of objects by the layer's number, or None."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping) or not all(
            str(key).isdecimal() and isinstance(v, Mapping) for key, v in value.items()
        ):
            raise self._wrong(name, "an object of layers")
        return {int(key): v for key, v in value.items()}

    def kinds(
        self, name: str, layers: int, known: set[str], usual: Sequence[str] | None = None
    ) -> Sequence[str]:
        """Returns the kind of each layer that the key `name` lists, or else `usual`.

        A kind that is not `known`, or another number of them, is an error.
        """
        kinds = self.texts(name) or usual
        if not kinds:
            raise InvalidArgumentError(f"config.json lacks {name}; complete the file")
        if unknown := sorted(set(kinds) - known):
            raise InvalidArgumentError(
                f"config.json has {name} {', '.join(unknown)}; correct the file to some of"
                f" {', '.join(sorted(known))}, or give a model without such layers"
            )
        check_length(name, kinds, layers)
        return kinds

    def _list(self, name: str, kind: type, expected: str) -> Any:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(v, kind) for v in value):
            raise self._wrong(name, expected)
        return value

    def _whole(self, names: Sequence[str], least: int, default: int | None) -> int:
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise self._wrong(name, f"a whole number of at least {least}")
            if value > _MOST:
                raise self._wrong(name, f"a whole number of at most {_MOST}")
            return value
        if default is not None:
            return default
        raise InvalidArgumentError(f"config.json lacks {' or '.join(names)}; complete the file")

    def _wrong(self, name: str, expected: str) -> InvalidArgumentError:
        return wrong(name, self.get(name), expected)
