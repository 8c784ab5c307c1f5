"""How many copies a model may have: the section of the YAML, and the bounds that follow from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from prism.errors import ConfigError


class ReplicasYaml(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How many copies a model may have, each on devices of its own. The policy prism makes them."""

    # So many stay up, whether or not requests come. 1: the last one may be evicted, too.
    min: int = 1
    # Default: as many as the devices hold.
    max: int | None = None

    def bounds(self, key: str, nodes: Iterable[str], tp: int) -> tuple[int, int]:
        """(fewest, most). key: for messages. nodes: of each device that it may be on; a copy stays
        within one. Raises ConfigError."""
        if self.max is not None and self.max < 1:
            raise ConfigError(f"{key}.replicas.max: {self.max} must be at least 1")
        room = max(1, sum(count // tp for count in Counter(nodes).values()))
        most = room if self.max is None else min(self.max, room)
        if not 1 <= self.min <= most:
            raise ConfigError(
                f"{key}.replicas.min: {self.min} must be 1 to {most}, the most that replicas.max"
                " and the devices allow"
            )
        return self.min, most
