"""Watch of engines that send no messages. Step-driven."""

from __future__ import annotations

from collections.abc import Iterator

from prism.agent.state.device_state import DeviceState
from prism.agent.state.engine_pool import EngineProcess, EngineState


class SilenceWatch:
    """Watch of the time since each engine's last message."""

    def __init__(self, state: DeviceState) -> None:
        self._pool = state.pool
        self._timing = state.timing
        self._now_s = state.now_s
        self._ticked_s = self._now_s()

    def silent(self) -> Iterator[tuple[EngineProcess, float]]:
        """Yields engines that have been silent for too long, and the seconds. Call every `tick_s`.

        Each is checked when the caller has handled the one before it.
        """
        self._discount_own_suspension()
        limits_s = {
            EngineState.STARTING: self._timing.hello_s + self._pool.import_s,
            EngineState.ACTIVATING: self._timing.activation_s,
        }
        for engine in self._pool:
            limit_s = limits_s.get(engine.state, self._timing.silent_s)
            silent_s = self._now_s() - engine.seen_s
            if silent_s > limit_s:
                yield engine, silent_s

    def _discount_own_suspension(self) -> None:
        """Excludes a gap between ticks from the silence of engines.

        A gap means that this process was suspended (SIGSTOP, or the whole machine).
        """
        now_s = self._now_s()
        away_s, self._ticked_s = now_s - self._ticked_s, now_s
        if away_s > self._timing.away_s:
            for engine in self._pool:
                engine.seen_s = min(now_s, engine.seen_s + away_s)
