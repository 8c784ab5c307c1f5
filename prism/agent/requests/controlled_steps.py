"""Steps of this device's engines under a policy's step control (`Policy.steps`).

Requests wait in the agent's table until the control selects them for a prefill, which admits them.
Tensor-parallel engines are controlled by the agent of their rank 0.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from kvcached import ClientUsage, Device
from prism.agent.network.sockets import EngineLink
from prism.agent.requests.running import RunningRequests
from prism.agent.state.device_state import DeviceState, HostedModel, ModelState
from prism.agent.state.engine_pool import EngineProcess
from prism.agent.state.request_table import RequestState, TrackedRequest
from prism.messages.engine import EndRun, JobEnded, SetLimit, StartJob
from prism.policies.data import request_kv_tokens
from prism.policies.multiplexing.steps import (
    DeviceStepView,
    EngineStepView,
    Phase,
    StepControl,
    StepJob,
    StepRequest,
)
from prism.scheduler.decision_journal import Sink, StepsChosen
from prism.scheduler.step_loop import StepLoop

SHORT_S = 0.05
"""Time after which a model whose job found no memory may start another one."""


@dataclass(slots=True)
class _Job:
    """Job that an engine has, or gets once its requests are admitted."""

    requests: Sequence[TrackedRequest]
    sm_share: float
    repeats: bool
    is_sent: bool = False
    ends: bool = False


@dataclass(slots=True)
class _Times:
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
        mean_s = self.mean_s
        return math.sqrt(max(0.0, self.squares / self.count - mean_s * mean_s)) if self.count else 0


@dataclass(frozen=True, slots=True)
class _Engine:
    """Engine that can step, with its requests."""

    hosted: HostedModel
    process: EngineProcess
    waiting: Sequence[TrackedRequest] = ()
    running: Sequence[TrackedRequest] = ()


@dataclass(slots=True)
class _Memory:
    """KV memory of the device in a view, in bytes."""

    capacity_bytes: int
    used_bytes: dict[str, int] = field(default_factory=dict)  # by engine


class ControlledSteps:
    """`StepPort` of a device's engines, and the loop on it. For one event loop.

    Args:
        running: preempts requests for a suspect.
        journal: receives each choice, if inputs are kept.
    """

    def __init__(
        self,
        state: DeviceState,
        control: StepControl,
        *,
        device: Device,
        engines: EngineLink,
        running: RunningRequests,
        journal: Sink | None = None,
    ) -> None:
        self._state = state
        self._requests = state.requests
        self._device = device
        self._engines = engines
        self._running = running
        observe = self._observer(journal) if journal is not None and journal.inputs else None
        self._loop = StepLoop(control, self, observe)
        self._jobs: dict[str, dict[Phase, _Job]] = defaultdict(dict)  # by engine
        self._short_s: dict[str, float] = {}  # model -> when its job found no memory
        self._peak_bytes: dict[str, int] = {}  # by model
        self._times: dict[str, _Times] = defaultdict(_Times)
        self._limits: dict[str, int] = {}  # engine -> KV limit that it was sent
        self._admitting: list[TrackedRequest] = []
        self._seen_changes = 0
        self._admits = True

    # --- the agent's calls ------------------------------------------------------------------

    def step(self, *, admits: bool) -> list[TrackedRequest]:
        """Consults the control. Returns the requests to admit now; `admitted` must follow.

        Args:
            admits: whether waiting requests may start.
        """
        self._admits = admits
        self._consult()
        for model in self._suspected():
            self._running.preempt(model)
        admitting, self._admitting = self._admitting, []
        return admitting

    def admitted(self) -> None:
        """Starts the prefills whose requests have been submitted since `step`."""
        for engine_id, jobs in list(self._jobs.items()):
            job = jobs.get(Phase.PREFILL)
            if job is None or job.is_sent:
                continue
            job.requests = [each for each in job.requests if each.engine_id == engine_id]
            if not job.requests or not self._send(engine_id, Phase.PREFILL, job):
                del jobs[Phase.PREFILL]
                self._requests.wake()

    def ended(self, engine_id: str, message: JobEnded) -> None:
        """Handles the end of a job."""
        phase = Phase(message.phase)
        job = self._jobs[engine_id].pop(phase, None)
        if job is None:
            return
        now_s = self._state.now_s()
        for each in job.requests:
            each.executed_s += message.seconds
            each.stepped_s = now_s
            if self._requests.has_ended(each.request):
                self._times[each.request.model].add(each.executed_s)
        hosted = self._state.models.on_engine(engine_id)
        if message.lacks_memory and hosted is not None:
            self._short_s[hosted.name] = now_s
        self._consult()

    def _consult(self, *, changed: bool = False) -> None:
        if self._seen_changes != self._requests.changes:
            self._seen_changes, changed = self._requests.changes, True
        retry_s = self._state.now_s() - SHORT_S
        changed |= any(since_s < retry_s for since_s in self._short_s.values())
        self._loop.consult(changed=changed)
        if self._admitting:
            self._requests.wake()

    def _expired(self, choice: int) -> None:
        if self._loop.is_last(choice):
            self._consult(changed=True)

    # --- StepPort ---------------------------------------------------------------------------

    def models(self) -> Set[str]:
        ready = {hosted.name: hosted.engine_id for hosted in self._ready()}
        for engine_id in self._jobs.keys() - ready.values():
            self._forget(engine_id)
        return ready.keys()

    def view(self) -> DeviceStepView:
        engines = self._read()
        memory = self._memory(engines)
        jobs = (job for jobs in self._jobs.values() for job in jobs.values())
        return DeviceStepView(
            self._state.now_s(),
            tuple(self._engine_view(engine, memory) for engine in engines),
            memory.capacity_bytes,
            max(0.0, 1.0 - sum(job.sm_share for job in jobs)),
        )

    def start(self, job: StepJob, *, repeats: bool) -> bool:
        hosted = self._state.models.hosted[job.model]
        found = [self._requests.get(request_id) for request_id in job.requests]
        requests = [each for each in found if each is not None]
        new = _Job(requests, job.sm_share, repeats)
        self._jobs[hosted.engine_id][job.phase] = new
        waiting = [each.id for each in requests if each.state is RequestState.WAITING]
        admitting = self._requests.admit(waiting)
        self._admitting += admitting
        left = {each.id for each in admitting}.union(job.requests) - set(waiting)
        new.requests = [each for each in requests if each.id in left]
        if admitting or (new.requests and self._send(hosted.engine_id, job.phase, new)):
            return True
        del self._jobs[hosted.engine_id][job.phase]
        self._short_s[job.model] = self._state.now_s()
        return False

    def retracted(self) -> bool:
        return False

    def end_runs(self, *, changed: bool) -> None:
        for engine_id, jobs in self._jobs.items():
            job = jobs.get(Phase.DECODE)
            if job is not None and job.repeats and not job.ends:
                job.ends = True
                self._engines.send(engine_id, EndRun())
        if changed:
            self._short_s.clear()

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Limits each model's KV to its quota, but not below one request of full context, with
        which it can always make progress."""
        self._peak_bytes.clear()
        for hosted in self._ready():
            process = self._state.pool.get(hosted.engine_id)
            if process is None or process.activated is None or hosted.name not in quotas:
                continue
            limit_bytes = max(quotas[hosted.name], process.activated.reserve_bytes)
            if self._limits.get(process.id) != limit_bytes:
                self._limits[process.id] = limit_bytes
                self._engines.send(process.id, SetLimit(limit_bytes))

    def expire_after(self, seconds: float, choice: int) -> None:
        asyncio.get_running_loop().call_later(seconds, self._expired, choice)

    def _send(self, engine_id: str, phase: Phase, job: _Job) -> bool:
        job.is_sent = True
        steps = 1 if phase is Phase.DECODE and not job.repeats else 0
        ids = [each.id for each in job.requests]
        return self._engines.send(engine_id, StartJob(phase.value, ids, steps))

    def _forget(self, engine_id: str) -> None:
        self._jobs.pop(engine_id, None)
        self._limits.pop(engine_id, None)

    # --- views ------------------------------------------------------------------------------

    def _ready(self) -> Iterable[HostedModel]:
        """Yields the models whose engine serves and has sent a status about them."""
        for hosted in self._state.models.hosted.values():
            engine = self._state.pool.get(hosted.engine_id)
            serves = hosted.state in (ModelState.ACTIVE, ModelState.DRAINING)
            if serves and not hosted.deactivating and engine is not None and engine.status:
                yield hosted

    def _read(self) -> list[_Engine]:
        waiting: dict[str, list[TrackedRequest]] = defaultdict(list)
        running: dict[str, list[TrackedRequest]] = defaultdict(list)
        for each in self._requests.waiting() if self._admits else ():
            waiting[each.request.model].append(each)
        for each in self._requests.on_engines():
            running[each.engine_id].append(each)
        found = []
        for hosted in self._ready():
            process = self._state.pool.get(hosted.engine_id)
            assert process is not None
            takes = hosted.state is ModelState.ACTIVE
            queue = waiting[hosted.name] if takes else []
            found.append(_Engine(hosted, process, queue, running[process.id]))
        return found

    def _memory(self, engines: Iterable[_Engine]) -> _Memory:
        usage = self._device.usage()
        clients = {client.name: client for client in usage.clients}
        loads = self._requests.loads()
        found = _Memory(usage.free_bytes)
        for engine in engines:
            process = engine.process
            elastic_bytes = _elastic_bytes(process, clients.get(process.id))
            found.capacity_bytes += elastic_bytes
            assert process.status is not None
            idle_tokens = process.status.free_mapped_tokens + process.status.evictable_tokens
            load = loads.get(process.id)
            coming_tokens = load.pending_need_tokens if load else 0
            used_bytes = elastic_bytes + (coming_tokens - idle_tokens) * process.token_bytes
            found.used_bytes[process.id] = max(0, used_bytes)
        return found

    def _engine_view(self, engine: _Engine, memory: _Memory) -> EngineStepView:
        process, name = engine.process, engine.hosted.name
        activated, jobs = process.activated, self._jobs[process.id]
        assert activated is not None
        stepping = {each.id for job in jobs.values() for each in job.requests}
        idle = [each for each in engine.running if each.id not in stepping and _can_step(each)]
        waiting = [*(each for each in idle if not each.prefilled), *_startable(engine)]
        kv_bytes = memory.used_bytes[process.id]
        peak_bytes = self._peak_bytes[name] = max(kv_bytes, self._peak_bytes.get(name, 0))
        totals, times = self._state.models.totals(name), self._times[name]
        return EngineStepView(
            model=name,
            prefill=() if name in self._short_s else self._views(waiting, process, 0),
            decode=self._views((each for each in idle if each.prefilled), process, 1),
            busy=frozenset(jobs),
            token_bytes=process.token_bytes,
            kv_bytes=kv_bytes,
            kv_peak_bytes=peak_bytes,
            weight=float((totals.prompt_tokens + totals.output_tokens) * process.token_bytes),
            decode_sm_share=engine.hosted.sm_share,
            batch_max=activated.max_running,
            execution_s=times.mean_s,
            execution_std_s=times.std_s,
            executing=len(stepping),
        )

    def _views(
        self, requests: Iterable[TrackedRequest], process: EngineProcess, more_tokens: int
    ) -> tuple[StepRequest, ...]:
        now_s, ahead_s = self._state.now_s(), self._requests.wall_ahead_s()
        assert process.activated is not None
        found = []
        for each in requests:
            request = each.request
            arrival_s = request.arrival_unix_s - ahead_s
            tokens = len(request.prompt_ids) + max(each.produced, request.resumed_tokens)
            kv_tokens = request_kv_tokens(process.activated, tokens) + more_tokens
            since_s = now_s - (each.stepped_s or arrival_s)
            prompt_tokens = len(request.prompt_ids)
            found.append(
                StepRequest(each.id, arrival_s, prompt_tokens, kv_tokens, each.executed_s, since_s)
            )
        found.sort(key=lambda each: (each.arrival_s, each.id))
        return tuple(found)

    def _suspected(self) -> list[str]:
        """Returns the models whose running requests stop for a waiting suspect."""
        return [
            engine.hosted.name
            for engine in self._read()
            if any(each.request.is_suspect for each in engine.waiting)
            and engine.running
            and not any(each.is_on_trial for each in engine.running)
        ]

    def _observer(self, journal: Sink) -> Callable[[DeviceStepView, Collection[StepJob]], None]:
        def observe(view: DeviceStepView, jobs: Collection[StepJob]) -> None:
            journal.add(StepsChosen(time_s=view.now_s, view=view, jobs=tuple(jobs)))

        return observe


def _can_step(run: TrackedRequest) -> bool:
    return run.state is RequestState.RUNNING and not run.preempted


def _startable(engine: _Engine) -> Sequence[TrackedRequest]:
    """Returns the waiting requests that may start: a suspect only alone, and before the others
    (`RequestTable`)."""
    suspects = [each for each in engine.waiting if each.request.is_suspect]
    if any(each.is_on_trial for each in engine.running) or (suspects and engine.running):
        return ()
    if suspects:
        return [min(suspects, key=lambda each: each.request.suspected_at or 0)]
    return engine.waiting


def _elastic_bytes(process: EngineProcess, client: ClientUsage | None) -> int:
    """Returns the KV memory that an engine holds, its idle pages included."""
    assert process.status is not None
    return max(0, client.reserved_bytes - process.status.static_bytes) if client else 0
