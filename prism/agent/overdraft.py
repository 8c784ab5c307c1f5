"""Engines that hold more of their GPU than they leased make way for fresh ones.

Step-driven. The ledger grants pages and leases; an engine's CUDA context, torch and libraries take
memory by themselves, and so do processes that know no ledger. What the driver says is the truth.
An engine is replaced when it has been beyond its lease, by more than the slack, for
`AgentTiming.overdraft_s`: one without a model first, then the one with the fewest requests. The
next replacement waits, and longer each time. A fresh engine that does the same at the same stage
is no fault that another one cures: it stays, and the log says what to do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from kvcached import Device, DeviceUsage, DriverMemory, KvcachedError
from kvcached.driver_memory import drift
from prism.agent.pool import EngineProcess, EngineState
from prism.agent.state import DeviceState
from prism.config.units import format_size
from prism.messages.gpu import ForeignProcess, GpuMemory

log = logging.getLogger(__name__)


Replace = Callable[[EngineProcess, str], None]  # an engine, for this reason
Stage = tuple[EngineState, str | None]  # and its model

_MPS = "nvidia-cuda-mps"  # its server belongs to no cluster
_JUDGED = (EngineState.FREE, EngineState.ACTIVE)


@dataclass(frozen=True, slots=True)
class MemoryComparison:
    """`excess_bytes`: of each process of the ledger that the driver names, what it holds beyond
    what it was granted; negative: granted and not used."""

    memory: GpuMemory
    excess_bytes: Mapping[int, int] = field(default_factory=dict)


def compare(
    usage: DeviceUsage,
    driver: DriverMemory,
    *,
    ledger_pids: Mapping[int, int],
    outsiders_bytes: int = 0,
    replaced_total: int = 0,
) -> MemoryComparison:
    """Sets the driver's figure beside the ledger's (`kvcached.driver_memory.drift`).

    `ledger_pids` maps the driver's number of a process to the ledger's. `outsiders_bytes` were used
    before any process of the ledger was there; they count where the driver names no process.
    """
    found = drift(driver, usage, ledger_pids)
    if found.names_processes:
        drift_bytes = sum(max(0, excess) for excess in found.excess_bytes.values())
    else:
        drift_bytes = max(0, found.drift_bytes - outsiders_bytes)
    promised_bytes = usage.capacity_bytes - found.ledger_bytes
    memory = GpuMemory(
        total_bytes=driver.total_bytes,
        free_bytes=driver.free_bytes,
        drift_bytes=drift_bytes,
        short_bytes=max(0, promised_bytes - driver.free_bytes),
        foreign=tuple(ForeignProcess(p.pid, p.used_bytes or 0, p.name) for p in found.foreign),
        replaced_total=replaced_total,
    )
    return MemoryComparison(memory, found.excess_bytes)


@dataclass(slots=True)
class _Pause:
    """Between replacements; doubles, and is forgotten after a time without cause."""

    least_s: float
    most_s: float
    length_s: float = 0.0
    until_s: float = float("-inf")

    def begin(self, now_s: float) -> None:
        self.length_s = min(self.most_s, self.length_s * 2 or self.least_s)
        self.until_s = now_s + self.length_s

    def forget(self, now_s: float) -> None:
        """There is no cause: after twice the pause it starts from the beginning."""
        if now_s > self.until_s + self.length_s:
            self.length_s = 0.0


class MemoryWatch:
    """Of one device. It does nothing on a host device, and where the driver does not answer."""

    def __init__(
        self,
        state: DeviceState,
        device: Device,
        *,
        is_gpu: bool,
        slack_bytes: int,
        replace: Replace,
    ) -> None:
        self._state = state
        self._device = device
        self._is_gpu = is_gpu
        self._slack_bytes = slack_bytes
        self._replace = replace
        timing = state.timing
        self._pause = _Pause(timing.overdraft_pause_s, timing.overdraft_pause_max_s)
        self._next_s = float("-inf")
        self._since_s: dict[str, float] = {}
        self._foreign_since_s: dict[int, float] = {}
        self._told: set[int] = set()
        self._replaced_bytes: dict[Stage, int] = {}  # the excess that engines were replaced for
        self._named: set[Stage] = set()  # where replacing did not cure it
        self._refusals: set[str] = set()
        self._outsiders_bytes: int | None = None
        self._replaced_total = 0
        self.memory: GpuMemory | None = None
        """As of the last look."""

    def look_soon(self) -> None:
        """At the next tick: memory has just come free."""
        self._next_s = float("-inf")

    async def run(self) -> NoReturn:
        """Asks in a thread: the driver may take seconds while a large process is torn down."""
        while True:
            if self.is_due():
                self.take(await asyncio.to_thread(self.ask))
            await asyncio.sleep(self._state.timing.tick_s)

    def is_due(self) -> bool:
        now_s = self._state.now_s()
        if not self._is_gpu or now_s < self._next_s:
            return False
        self._next_s = now_s + self._state.timing.drift_s
        return True

    def ask(self) -> DriverMemory | None:
        """What the driver says. From any thread, one at a time."""
        try:
            return self._device.driver_memory()
        except KvcachedError as error:
            if str(error) not in self._refusals:
                self._refusals.add(str(error))
                name = self._device.name
                log.warning("%s: the driver does not say what is held: %s", name, error)
            return None

    def take(self, driver: DriverMemory | None) -> None:
        now_s = self._state.now_s()
        found = self._compare(driver, self._device.usage()) if driver is not None else None
        self.memory = found.memory if found is not None else None
        self._judge(self._excess_bytes(found), now_s)
        if found is not None:
            self._tell_of_foreign(found.memory, now_s)

    def _compare(self, driver: DriverMemory, usage: DeviceUsage) -> MemoryComparison:
        if self._outsiders_bytes is None:
            granted = sum(c.committed_bytes + c.static_bytes for c in usage.clients)
            self._outsiders_bytes = max(0, driver.used_bytes - granted)
        return compare(
            usage,
            driver,
            ledger_pids={
                engine.outside.driver_pid: engine.pid
                for engine in self._state.pool
                if engine.outside is not None and engine.outside.driver_pid
            },
            outsiders_bytes=self._outsiders_bytes,
            replaced_total=self._replaced_total,
        )

    def _excess_bytes(self, found: MemoryComparison | None) -> dict[str, int]:
        """By engine: as the driver says, or as it says itself, of its ranks elsewhere too."""
        seen = found.excess_bytes if found is not None else {}
        return {
            engine.id: max(
                seen.get(engine.pid, 0),
                engine.outside.excess_bytes if engine.outside is not None else 0,
            )
            for engine in self._state.pool
            if engine.state in _JUDGED
        }

    # --- engines ---------------------------------------------------------------------------

    def _judge(self, excess_bytes: dict[str, int], now_s: float) -> None:
        over = {name for name, size in excess_bytes.items() if size > self._slack_bytes}
        self._since_s = {name: self._since_s.get(name, now_s) for name in over}
        if not over:
            self._pause.forget(now_s)
        bound_s = self._state.timing.overdraft_s
        overdue = [name for name, since_s in self._since_s.items() if now_s - since_s >= bound_s]
        engines = [engine for name in overdue if (engine := self._state.pool.get(name))]
        curable = [e for e in engines if self._is_curable(e, excess_bytes[e.id])]
        if curable and now_s >= self._pause.until_s:
            self._replace_one(curable, excess_bytes, now_s)

    def _is_curable(self, engine: EngineProcess, excess_bytes: int) -> bool:
        """Not where another was replaced for about as much: its successor most likely does what it
        did. So replacements end, whatever engines hold."""
        stage = (engine.state, engine.model)
        before_bytes = self._replaced_bytes.get(stage)
        if before_bytes is None or excess_bytes > before_bytes + self._slack_bytes:
            return True
        if stage not in self._named:
            self._named.add(stage)
            log.error(
                "%s (%s) holds %s of %s beyond its lease, and replacing an engine for %s did not"
                " cure it: raise engine.static; it is not replaced",
                engine.id,
                f"model {engine.model}" if engine.model else "no model",
                format_size(excess_bytes),
                self._device.name,
                format_size(before_bytes),
            )
        return False

    def _replace_one(
        self, engines: list[EngineProcess], excess_bytes: dict[str, int], now_s: float
    ) -> None:
        engine = min(engines, key=self._order)
        stage = (engine.state, engine.model)
        self._replaced_bytes[stage] = excess_bytes[engine.id]
        self._named.discard(stage)
        del self._since_s[engine.id]
        self._pause.begin(now_s)
        self._replaced_total += 1
        self._replace(
            engine,
            f"it holds {format_size(excess_bytes[engine.id])} of {self._device.name} beyond its"
            f" lease, for more than {self._state.timing.overdraft_s:.0f} s",
        )

    def _order(self, engine: EngineProcess) -> tuple[bool, int, str]:
        """Idle ones first, then those with the fewest requests."""
        load = len(self._state.requests.on_engine(engine.id))
        return engine.state is not EngineState.FREE, load, engine.id

    # --- others ----------------------------------------------------------------------------

    def _tell_of_foreign(self, memory: GpuMemory, now_s: float) -> None:
        """Once for each process. One that is killed is seen for a while, as our own are."""
        pids = {p.pid: p for p in memory.foreign if _MPS not in p.name}
        self._foreign_since_s = {pid: self._foreign_since_s.get(pid, now_s) for pid in pids}
        self._told &= pids.keys()
        for pid, since_s in self._foreign_since_s.items():
            if pid not in self._told and now_s - since_s >= self._state.timing.overdraft_s:
                self._told.add(pid)
                self._warn(pids[pid], memory)

    def _warn(self, process: ForeignProcess, memory: GpuMemory) -> None:
        outcome = "there is room for both"
        if memory.short_bytes:
            short = format_size(memory.short_bytes)
            outcome = f"{short} that the ledger promises are not there; end it or lower capacity"
        log.warning(
            "process %d (%s) holds %s of %s and is none of this cluster's: %s",
            process.pid,
            process.name or "unknown",
            format_size(process.used_bytes),
            self._device.name,
            outcome,
        )
