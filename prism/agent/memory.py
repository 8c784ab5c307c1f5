"""Memory that one engine needs and another holds for nothing: prefix cache, spare pages."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvcached import Device
from prism.agent.engines import EngineLink
from prism.agent.state import State
from prism.messages import Trim, Trimmed

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Flush:
    """An order to give everything back: calls `on_done(bytes)` when `left` engines answered."""

    left: int
    on_done: Callable[[int], None]
    returned_bytes: int = 0

    def answered(self, returned_bytes: int) -> None:
        self.returned_bytes += returned_bytes
        self.left -= 1
        if self.left == 0:
            self.on_done(self.returned_bytes)


class Reclaimer:
    """Asks engines to give idle memory back, so that no model starves on another's cache.

    An engine answers its Trim messages in order, which says whose answer one is.
    """

    def __init__(self, state: State, device: Device, link: EngineLink) -> None:
        self._state = state
        self._device = device
        self._link = link
        self._asked_s: dict[str, float] = {}
        self._unanswered: defaultdict[str, deque[Flush | None]] = defaultdict(deque)

    def flush(self, engine_ids: Collection[str], on_done: Callable[[int], None]) -> None:
        """All idle memory of these engines; `on_done` gets the bytes that came back."""
        if not engine_ids:
            on_done(0)
            return
        flush = Flush(len(engine_ids), on_done)
        for engine_id in engine_ids:
            self._unanswered[engine_id].append(flush)
            if not self._link.send(engine_id, Trim()):
                self.lost(engine_id)

    def trimmed(self, engine_id: str, message: Trimmed) -> None:
        """An engine's answer."""
        waiting = self._unanswered[engine_id]
        flush = waiting.popleft() if waiting else None
        if flush is not None:
            flush.answered(message.returned_bytes)

    def lost(self, engine_id: str) -> None:
        """This engine answers no more."""
        self._asked_s.pop(engine_id, None)
        for flush in self._unanswered.pop(engine_id, ()):
            if flush is not None:
                flush.answered(0)

    def reclaim(self, need_bytes: int, for_engine: str) -> None:
        """Ask others for `need_bytes`: idle ones first, then those that hold most. Each engine at
        most every `reclaim_s`; what it was asked for a moment ago counts as on its way."""
        loads = self._state.running.loads()
        idle_bytes = self._reclaimable_bytes(for_engine)
        for engine_id in sorted(idle_bytes, key=lambda i: (i in loads, -idle_bytes[i])):
            if need_bytes <= 0:
                return
            target_bytes = min(need_bytes, idle_bytes[engine_id])
            need_bytes -= target_bytes
            self._ask(engine_id, target_bytes)

    def _reclaimable_bytes(self, for_engine: str) -> dict[str, int]:
        """Engine id -> bytes that would help others: idle, and above what it is guaranteed."""
        found: dict[str, int] = {}
        for client in self._device.usage().clients:
            engine = self._state.pool.get(client.name)
            if engine is not None and engine.id != for_engine:
                spare_bytes = client.reserved_bytes - client.min_bytes
                found[engine.id] = min(engine.idle_bytes, spare_bytes)
        return {engine_id: size for engine_id, size in found.items() if size > 0}

    def _ask(self, engine_id: str, target_bytes: int) -> None:
        now_s = self._state.now_s()
        if now_s - self._asked_s.get(engine_id, float("-inf")) < self._state.timing.reclaim_s:
            return
        self._asked_s[engine_id] = now_s
        log.debug("%s shall give back %d bytes", engine_id, target_bytes)
        if self._link.send(engine_id, Trim(target_bytes=target_bytes)):
            self._unanswered[engine_id].append(None)
