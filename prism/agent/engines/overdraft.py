"""Replaces engines that hold more of their GPU than they leased.

The ledger grants pages and leases, but CUDA contexts, torch and libraries take memory without it,
as do processes that do not use the ledger. So usage is compared with the driver's figures.

An engine is replaced when it has exceeded its lease, by more than the slack, for
`AgentTiming.overdraft_s`: engines without a model first, then those with the fewest requests. The
pause before the next replacement doubles each time. If a fresh engine exceeds its lease at the same
stage again, another replacement would not help: the engine stays and the log says what to do.
Step-driven.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from kvcached import Device, DeviceUsage, DriverMemory, KvcachedError
from kvcached.driver.driver_memory import drift
from prism.agent.state.device_state import DeviceState
from prism.agent.state.engine_pool import EngineProcess, EngineState
from prism.config.schema.units import format_size
from prism.messages.gpu_memory import ForeignProcess, GpuMemory

log = logging.getLogger(__name__)


Replace = Callable[[EngineProcess, str], None]  # (engine, reason)
Stage = tuple[EngineState, str | None]  # (state, model)

_MPS = "nvidia-cuda-mps"  # the MPS server, a process of no cluster
_CHECKED = (EngineState.FREE, EngineState.ACTIVE)


@dataclass(frozen=True, slots=True)
class MemoryComparison:
    """Memory of a GPU according to the driver and to the ledger."""

    memory: GpuMemory
    # Pid in the ledger -> memory beyond its grants; negative: granted but not used. Only processes
    # that the driver names.
    excess_bytes: Mapping[int, int] = field(default_factory=dict)


def compare(
    usage: DeviceUsage,
    driver: DriverMemory,
    *,
    ledger_pids: Mapping[int, int],
    baseline_bytes: int = 0,
    replaced_total: int = 0,
) -> MemoryComparison:
    """Compares the driver's figures with the ledger's (`kvcached.driver.driver_memory.drift`).

    Args:
        ledger_pids: pid in the driver's namespace -> pid in the ledger.
        baseline_bytes: memory in use before the ledger's processes started. It matters only if the
            driver does not name processes.
        replaced_total: number of engines replaced so far.
    """
    found = drift(driver, usage, ledger_pids)
    if found.names_processes:
        drift_bytes = sum(max(0, excess) for excess in found.excess_bytes.values())
    else:
        drift_bytes = max(0, found.drift_bytes - baseline_bytes)
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
    """Pause between replacements, which doubles each time until a period without a cause."""

    least_s: float
    most_s: float
    length_s: float = 0.0
    until_s: float = float("-inf")

    def begin(self, now_s: float) -> None:
        self.length_s = min(self.most_s, self.length_s * 2 or self.least_s)
        self.until_s = now_s + self.length_s

    def reset_if_quiet(self, now_s: float) -> None:
        """Resets the length if the pause ended at least its length ago.

        REQUIRES: no engine exceeds its lease.
        """
        if now_s > self.until_s + self.length_s:
            self.length_s = 0.0


class MemoryWatch:
    """Watch of one device's memory. Does nothing on a host device or without a driver's answer."""

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
        self._since_s: dict[str, float] = {}  # engine -> since when it exceeds its lease
        self._foreign_since_s: dict[int, float] = {}  # pid -> since when it uses the GPU
        self._warned_pids: set[int] = set()
        self._replaced_bytes: dict[Stage, int] = {}  # excess for which an engine was replaced
        self._incurable: set[Stage] = set()  # stages logged as not cured by a replacement
        self._driver_errors: set[str] = set()
        self._baseline_bytes: int | None = None
        self._replaced_total = 0
        self.memory: GpuMemory | None = None
        """Result of the last check."""

    def check_soon(self) -> None:
        """Makes the next check due at once, for example when memory was freed."""
        self._next_s = float("-inf")

    async def run(self) -> NoReturn:
        """Checks periodically.

        Calls the driver in a thread: it may take seconds while a large process is torn down.
        """
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
        """Returns the driver's figures, or None after an error. From any thread, one at a time."""
        try:
            return self._device.driver_memory()
        except KvcachedError as error:
            if str(error) not in self._driver_errors:
                self._driver_errors.add(str(error))
                name = self._device.name
                log.warning("%s: the driver does not report memory usage: %s", name, error)
            return None

    def take(self, driver: DriverMemory | None) -> None:
        now_s = self._state.now_s()
        found = self._compare(driver, self._device.usage()) if driver is not None else None
        self.memory = found.memory if found is not None else None
        self._check_engines(self._excess_bytes(found), now_s)
        if found is not None:
            self._check_foreign(found.memory, now_s)

    def _compare(self, driver: DriverMemory, usage: DeviceUsage) -> MemoryComparison:
        if self._baseline_bytes is None:
            granted = sum(c.committed_bytes + c.static_bytes for c in usage.clients)
            self._baseline_bytes = max(0, driver.used_bytes - granted)
        return compare(
            usage,
            driver,
            ledger_pids={
                engine.outside.driver_pid: engine.pid
                for engine in self._state.pool
                if engine.outside is not None and engine.outside.driver_pid
            },
            baseline_bytes=self._baseline_bytes,
            replaced_total=self._replaced_total,
        )

    def _excess_bytes(self, found: MemoryComparison | None) -> dict[str, int]:
        """Returns engine id -> excess: the driver's figure or the engine's own, if that is larger.

        The engine's own figure includes its ranks on other devices.
        """
        seen = found.excess_bytes if found is not None else {}
        return {
            engine.id: max(
                seen.get(engine.pid, 0),
                engine.outside.excess_bytes if engine.outside is not None else 0,
            )
            for engine in self._state.pool
            if engine.state in _CHECKED
        }

    # --- engines ---------------------------------------------------------------------------

    def _check_engines(self, excess_bytes: dict[str, int], now_s: float) -> None:
        over = {name for name, size in excess_bytes.items() if size > self._slack_bytes}
        self._since_s = {name: self._since_s.get(name, now_s) for name in over}
        if not over:
            self._pause.reset_if_quiet(now_s)
        limit_s = self._state.timing.overdraft_s
        overdue = [name for name, since_s in self._since_s.items() if now_s - since_s >= limit_s]
        engines = [engine for name in overdue if (engine := self._state.pool.get(name))]
        curable = [e for e in engines if self._is_curable(e, excess_bytes[e.id])]
        if curable and now_s >= self._pause.until_s:
            self._replace_one(curable, excess_bytes, now_s)

    def _is_curable(self, engine: EngineProcess, excess_bytes: int) -> bool:
        """Returns whether a replacement may help.

        It does not if an engine at the same stage was replaced for about as much before. So the
        number of replacements is limited, whatever engines hold.
        """
        stage = (engine.state, engine.model)
        before_bytes = self._replaced_bytes.get(stage)
        if before_bytes is None or excess_bytes > before_bytes + self._slack_bytes:
            return True
        if stage not in self._incurable:
            self._incurable.add(stage)
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
        self._incurable.discard(stage)
        del self._since_s[engine.id]
        self._pause.begin(now_s)
        self._replaced_total += 1
        self._replace(
            engine,
            f"it holds {format_size(excess_bytes[engine.id])} of {self._device.name} beyond its"
            f" lease, for more than {self._state.timing.overdraft_s:.0f} s",
        )

    def _order(self, engine: EngineProcess) -> tuple[bool, int, str]:
        """Returns a sort key: free engines first, then those with the fewest requests."""
        load = len(self._state.requests.on_engine(engine.id))
        return engine.state is not EngineState.FREE, load, engine.id

    # --- other processes -------------------------------------------------------------------

    def _check_foreign(self, memory: GpuMemory, now_s: float) -> None:
        """Warns once about each foreign process that stays for `overdraft_s`.

        The delay matters because the driver lists killed engines for a while.
        """
        pids = {p.pid: p for p in memory.foreign if _MPS not in p.name}
        self._foreign_since_s = {pid: self._foreign_since_s.get(pid, now_s) for pid in pids}
        self._warned_pids &= pids.keys()
        for pid, since_s in self._foreign_since_s.items():
            if pid not in self._warned_pids and now_s - since_s >= self._state.timing.overdraft_s:
                self._warned_pids.add(pid)
                self._warn(pids[pid], memory)

    def _warn(self, process: ForeignProcess, memory: GpuMemory) -> None:
        outcome = "memory suffices for both"
        if memory.short_bytes:
            short = format_size(memory.short_bytes)
            outcome = f"the ledger's capacity lacks {short}; end the process or lower capacity"
        log.warning(
            "process %d (%s) holds %s of %s and does not belong to this cluster: %s",
            process.pid,
            process.name or "unknown",
            format_size(process.used_bytes),
            self._device.name,
            outcome,
        )
