"""The log files of a nursery's engines: every engine has one, ids are not used again."""

from __future__ import annotations

from pathlib import Path

ENDED_LOGS_MAX = 8


class EngineLogs:
    """Logs of engines that run stay, and those of the `ENDED_LOGS_MAX` that ended last: an engine
    that dies again and again fills no disk, and the last deaths can be looked into."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ended: dict[str, None] = {}

    def path(self, engine_id: str) -> Path:
        return self._folder / f"{engine_id}.log"

    def started(self, engine_id: str) -> None:
        self._ended.pop(engine_id, None)

    def ended(self, engine_id: str) -> None:
        """Removes the oldest log of an ended engine if this one makes them too many."""
        self.started(engine_id)
        self._ended[engine_id] = None
        if len(self._ended) > ENDED_LOGS_MAX:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            self.path(oldest).unlink(missing_ok=True)
