"""Views of this device's engines for step control, at most one job of each phase on an engine.

Memory is read from the ledger at each view, as for the local scheduler (`EngineViews`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from kvcached import Device
from prism.agent.state.device_state import DeviceState, HostedModel, ModelState
from prism.agent.state.engine_pool import EngineProcess
from prism.agent.state.request_table import RequestState, TrackedRequest
from prism.messages.engine import Activated, EngineStatus
from prism.policies.data import request_kv_tokens
from prism.policies.multiplexing.steps import DeviceStepView, EngineStepView, Phase, StepRequest


@dataclass(slots=True)
class EngineJob:
    """Job that an engine has, or gets once its requests are admitted."""

    requests: Sequence[TrackedRequest]
    sm_share: float
    repeats: bool
    is_sent: bool = False
    ends: bool = False


Jobs = Mapping[str, Mapping[Phase, EngineJob]]
"""Jobs by engine."""


@dataclass(slots=True)
class ExecutionTimes:
    """Execution times of a model's requests that ended here."""

    count: int = 0
    total_s: float = 0.0
    squares: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds
        self.squares += seconds * seconds

    @property
    def mean_s(self) -> float:
        """Mean; 1 s before the first."""
        return self.total_s / self.count if self.count else 1.0

    @property
    def std_s(self) -> float:
        if not self.count:
            return 0.0
        return math.sqrt(max(0.0, self.squares / self.count - self.mean_s * self.mean_s))


@dataclass(frozen=True, slots=True)
class SteppableEngine:
    """Engine that can step, with its requests."""

    hosted: HostedModel
    process: EngineProcess
    activated: Activated
    status: EngineStatus
    # Requests that can start next: suspects, or the oldest ones.
    waiting: Sequence[TrackedRequest]
    running: Sequence[TrackedRequest]

    @property
    def name(self) -> str:
        return self.hosted.name

    @property
    def must_stop(self) -> bool:
        """True if its requests stop for a suspect that waits."""
        return self._has_suspect and not any(each.is_on_trial for each in self.running)

    def startable(self) -> Sequence[TrackedRequest]:
        """Returns the waiting requests that may start: a suspect only alone, and before the others
        (`RequestTable`)."""
        if any(each.is_on_trial for each in self.running):
            return ()
        if not self._has_suspect:
            return self.waiting
        first = min(self.waiting, key=lambda each: each.request.suspected_at or 0)
        return () if self.running else [first]

    @property
    def _has_suspect(self) -> bool:
        return bool(self.waiting) and self.waiting[0].request.is_suspect


class StepViews:
    """Source of `DeviceStepView`, with what it remembers of each model."""

    def __init__(self, state: DeviceState, device: Device) -> None:
        self._state = state
        self._requests = state.requests
        self._device = device
        # Engines to which a message could not be sent.
        self.unreachable: set[str] = set()
        # Engines of the last view.
        self.engines: Sequence[SteppableEngine] = ()
        self._peak_bytes: dict[str, int] = {}
        self._times: dict[str, ExecutionTimes] = defaultdict(ExecutionTimes)

    def ready(self) -> Iterator[tuple[HostedModel, EngineProcess]]:
        """Yields the models whose engine serves and has sent a status about them, with it."""
        for hosted in self._state.models.hosted.values():
            engine = self._state.pool.get(hosted.engine_id)
            serves = hosted.state in (ModelState.ACTIVE, ModelState.DRAINING)
            reachable = hosted.engine_id not in self.unreachable and not hosted.deactivating
            if serves and reachable and engine is not None and engine.status:
                yield hosted, engine

    def _read(self, *, admits: bool) -> list[SteppableEngine]:
        waiting: dict[str, list[TrackedRequest]] = defaultdict(list)
        running: dict[str, list[TrackedRequest]] = defaultdict(list)
        for each in self._requests.waiting() if admits else ():
            waiting[each.request.model].append(each)
        for each in self._requests.on_engines():
            running[each.engine_id].append(each)
        found = []
        for hosted, process in self.ready():
            assert process.activated is not None
            assert process.status is not None
            queue = waiting[hosted.name] if hosted.state is ModelState.ACTIVE else []
            first = _first(queue, process.activated.max_running)
            own = running[process.id]
            found.append(
                SteppableEngine(hosted, process, process.activated, process.status, first, own)
            )
        return found

    def view(self, jobs: Jobs, short: Collection[str], *, admits: bool) -> DeviceStepView:
        """Returns the input of step control.

        Args:
            jobs: those in flight.
            short: models whose waiting requests are hidden, since memory was too short for them.
            admits: whether waiting requests may start.
        """
        self.engines = engines = self._read(admits=admits)
        capacity_bytes, used_bytes = self._memory(engines)
        held = sum(job.sm_share for each in jobs.values() for job in each.values())
        return DeviceStepView(
            self._state.now_s(),
            tuple(
                self._engine(
                    engine,
                    jobs.get(engine.process.id, {}),
                    used_bytes[engine.name],
                    hidden=engine.name in short,
                )
                for engine in engines
            ),
            capacity_bytes,
            max(0.0, 1.0 - held),
        )

    def reset_peaks(self) -> None:
        self._peak_bytes.clear()

    def executed(self, request: TrackedRequest) -> None:
        """Counts the execution time of a request that ended."""
        self._times[request.request.model].add(request.executed_s)

    def _memory(self, engines: Sequence[SteppableEngine]) -> tuple[int, dict[str, int]]:
        """Returns the KV memory of the device, and the part that each model uses, in bytes."""
        usage, loads = self._device.usage(), self._requests.loads()
        clients = {client.name: client for client in usage.clients}
        capacity_bytes, used_bytes = usage.free_bytes, {}
        for engine in engines:
            process, status = engine.process, engine.status
            client, load = clients.get(process.id), loads.get(process.id)
            pages_bytes = client.reserved_bytes if client else 0
            capacity_bytes += max(pages_bytes, client.min_bytes if client else 0)
            coming_tokens = load.pending_need_tokens if load else 0
            idle_tokens = status.free_mapped_tokens + status.evictable_tokens
            held_bytes = max(0, pages_bytes - idle_tokens * process.token_bytes)
            peak_bytes = self._peak_bytes.get(engine.name, 0)
            self._peak_bytes[engine.name] = max(held_bytes, peak_bytes)
            used_bytes[engine.name] = held_bytes + coming_tokens * process.token_bytes
        return capacity_bytes, used_bytes

    def _engine(
        self,
        engine: SteppableEngine,
        jobs: Mapping[Phase, EngineJob],
        kv_bytes: int,
        *,
        hidden: bool,
    ) -> EngineStepView:
        process, name = engine.process, engine.name
        stepping = {each.id for job in jobs.values() for each in job.requests}
        idle = [each for each in engine.running if each.id not in stepping and _can_step(each)]
        waiting = [*(each for each in idle if not each.prefilled), *engine.startable()]
        decoding = [each for each in idle if each.prefilled]
        totals, times = self._state.models.totals(name), self._times[name]
        return EngineStepView(
            model=name,
            prefill=() if hidden else self._views(waiting, engine.activated, 0),
            decode=self._views(decoding, engine.activated, 1),
            busy=frozenset(jobs),
            token_bytes=process.token_bytes,
            kv_bytes=kv_bytes,
            kv_peak_bytes=self._peak_bytes[name],
            weight=float((totals.prompt_tokens + totals.output_tokens) * process.token_bytes),
            decode_sm_share=engine.hosted.sm_share,
            batch_max=engine.activated.max_running,
            execution_s=times.mean_s,
            execution_std_s=times.std_s,
            executing=len(stepping),
        )

    def _views(
        self, requests: Iterable[TrackedRequest], activated: Activated, more_tokens: int
    ) -> tuple[StepRequest, ...]:
        """Returns the views, oldest request first.

        Args:
            more_tokens: KV tokens of the next step, in addition to those of the known tokens.
        """
        now_s, ahead_s = self._state.now_s(), self._requests.wall_ahead_s()
        found = []
        for each in requests:
            arrival_s = each.request.arrival_unix_s - ahead_s
            prompt_tokens = len(each.request.prompt_ids)
            tokens = prompt_tokens + max(each.produced, each.request.resumed_tokens)
            kv_tokens = request_kv_tokens(activated, tokens) + more_tokens
            since_s = now_s - (each.stepped_s or arrival_s)
            found.append(
                StepRequest(each.id, arrival_s, prompt_tokens, kv_tokens, each.executed_s, since_s)
            )
        found.sort(key=lambda each: (each.arrival_s, each.id))
        return tuple(found)


def _first(waiting: Sequence[TrackedRequest], count: int) -> Sequence[TrackedRequest]:
    """Returns the requests that can start next: suspects if there are any, else the oldest ones.

    A view has no others: its size does not grow with the queue, and no control prefills more.
    """
    suspects = [each for each in waiting if each.request.is_suspect]
    return suspects or nsmallest(count, waiting, key=lambda each: each.request.arrival_unix_s)


def _can_step(run: TrackedRequest) -> bool:
    return run.state is RequestState.RUNNING and not run.preempted
