"""Section of the YAML for the priorities that requests may ask for."""

from __future__ import annotations

from prism.config.schema.machines import Strict
from prism.errors import ConfigError

# Limit of the classes in the queue's order.
_LIMIT = 1000


class PriorityConfig(Strict, frozen=True):
    """Priorities that requests may ask for. Waiting requests of higher priority start first."""

    # The lowest. Requests without a priority have 0.
    min: int = -100
    # The highest. Above 0, any client may have its requests start before those of others.
    max: int = 0

    def check(self, key: str) -> None:
        """Raises ConfigError. `key` is for messages."""
        if not -_LIMIT <= self.min <= 0 <= self.max <= _LIMIT:
            raise ConfigError(
                f"{key}: min {self.min} and max {self.max} must have 0 between them, and be within"
                f" -{_LIMIT} and {_LIMIT}"
            )
