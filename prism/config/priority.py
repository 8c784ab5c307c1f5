"""Which priorities requests may ask for: the section of the YAML."""

from __future__ import annotations

import msgspec

from prism.errors import ConfigError

# As wide as a class of the queue's order may be named.
_LIMIT = 1000


class PriorityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The priorities that a request may ask for. Waiting requests of a higher one start first."""

    # The lowest. Requests that name none have 0.
    min: int = -100
    # The highest. Above 0, any client may have its requests start before those of others.
    max: int = 0

    def check(self, key: str) -> None:
        """Raises ConfigError. key: for messages."""
        if not -_LIMIT <= self.min <= 0 <= self.max <= _LIMIT:
            raise ConfigError(
                f"{key}: min {self.min} and max {self.max} must have 0 between them, and lie"
                f" between -{_LIMIT} and {_LIMIT}"
            )
