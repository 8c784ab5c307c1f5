"""Section of the YAML for copies of a model, and the limits that follow from the devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prism.config.schema.machines import Strict
from prism.errors import ConfigError


class ReplicasYaml(Strict, frozen=True):
    """Number of copies of a model, each on separate devices. The policies prism and
    serverlessllm make them, and alpaserve and seallm at most `max`."""

    # The number of copies that stay without requests. 1: the last one may be evicted, too.
    min: int = 1
    # Default: as many as fit on the devices.
    max: int | None = None

    def bounds(self, key: str, nodes: Iterable[str], tp: int) -> tuple[int, int]:
        """Returns the fewest and the most copies. Raises ConfigError.

        Args:
            key: YAML key of the model, for messages.
            nodes: Node of each device that the model may be on. A copy is within one node.
            tp: Number of devices of a copy.
        """
        if self.max is not None and self.max < 1:
            raise ConfigError(f"{key}.replicas.max: {self.max} must be at least 1")
        fitting = max(1, sum(count // tp for count in Counter(nodes).values()))
        most = fitting if self.max is None else min(self.max, fitting)
        if not 1 <= self.min <= most:
            raise ConfigError(
                f"{key}.replicas.min: {self.min} must be 1 to {most}, the most that replicas.max"
                " and the devices allow"
            )
        return self.min, most
