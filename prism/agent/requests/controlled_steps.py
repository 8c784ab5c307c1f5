"""Steps of this device's engines under a policy's step control (`Policy.steps`).

Requests wait in the agent's table until the control selects them for a prefill, which admits them.
Tensor-parallel engines are controlled by the agent of their rank 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Set

from kvcached import Device
from prism.agent.network.sockets import EngineLink
from prism.agent.requests.running import RunningRequests
from prism.agent.requests.step_views import EngineJob, StepViews
from prism.agent.state.device_state import DeviceState
from prism.agent.state.request_table import RequestState, TrackedRequest
from prism.messages.engine import EndRun, JobEnded, SetLimit, StartJob
from prism.policies.multiplexing.steps import DeviceStepView, Phase, StepControl, StepJob
from prism.scheduler.decision_journal import QueueJournal, Sink
from prism.scheduler.step_loop import StepLoop

SHORT_S = 0.05
"""Time after which a model whose job found no memory may start another one."""


class ControlledSteps:
    """`StepPort` of a device's engines, and the loop on it. For one event loop.

    Args:
        running: preempts requests for a suspect.
        reclaim: as `Reclaimer.reclaim_tokens`.
        journal: receives the choices.
    """

    def __init__(
        self,
        state: DeviceState,
        control: StepControl,
        *,
        device: Device,
        engines: EngineLink,
        running: RunningRequests,
        reclaim: Callable[[int, str], None],
        journal: Sink | None = None,
    ) -> None:
        self._state = state
        self._requests = state.requests
        self._views = StepViews(state, device)
        self._engines = engines
        self._running = running
        self._reclaim = reclaim
        observer = None if journal is None else QueueJournal(journal, state.now_s)
        self._loop = StepLoop(control, self, observer.chosen if observer is not None else None)
        self._jobs: dict[str, dict[Phase, EngineJob]] = {}  # by engine
        self._short_s: dict[str, float] = {}  # model -> when its job found no memory
        self._limits: dict[str, int] = {}  # engine -> KV limit that it was sent
        self._admitting: list[TrackedRequest] = []
        self._seen_changes = 0
        self._admits = True
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # --- the agent's calls ------------------------------------------------------------------

    def step(self) -> list[TrackedRequest]:
        """Consults the control. Returns the requests to admit now; `admitted` must follow."""
        self._admits = True
        self._consult()
        for engine in self._views.engines:
            if engine.must_stop:
                self._running.preempt(engine.name)
        admitting, self._admitting = self._admitting, []
        return admitting

    def admitted(self) -> None:
        """Starts the prefills whose requests have been submitted since `step`."""
        for engine_id, jobs in list(self._jobs.items()):
            job = jobs.get(Phase.PREFILL)
            if job is None or job.is_sent:
                continue
            known = [each for each in job.requests if self._requests.get(each.id) is each]
            if any(each.state is RequestState.ADMITTING for each in known):
                continue  # chosen during the admission
            job.requests = [each for each in known if each.engine_id == engine_id]
            if not job.requests or not self._send(engine_id, Phase.PREFILL, job):
                del jobs[Phase.PREFILL]
                self._requests.wake()

    def hold_back(self) -> list[TrackedRequest]:
        """Lets only running requests step until the next `step`. Returns the requests that were
        chosen and not admitted, for the caller to let wait again."""
        self._admits = False
        for jobs in self._jobs.values():
            if (job := jobs.get(Phase.PREFILL)) is not None and not job.is_sent:
                del jobs[Phase.PREFILL]
        held, self._admitting = self._admitting, []
        self._consult()
        return held

    def forget(self, engine_id: str) -> None:
        """Forgets the jobs of an engine whose model has left."""
        self._jobs.pop(engine_id, None)
        self._limits.pop(engine_id, None)

    def close(self) -> None:
        """Ends all consultations."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def ended(self, engine_id: str, message: JobEnded) -> None:
        """Handles the end of a job."""
        job = self._jobs.get(engine_id, {}).pop(Phase(message.phase), None)
        if job is None:
            return
        now_s = self._state.now_s()
        for each in job.requests:
            each.executed_s += message.seconds
            each.stepped_s = now_s
            if not each.prefilled:
                each.need_tokens = 0  # it is a candidate again, with all its tokens
            if self._requests.has_ended(each.request):
                self._views.executed(each)
        hosted = self._state.models.on_engine(engine_id)
        if message.lacks_memory and hosted is not None:
            self._short_s[hosted.name] = now_s
            tokens = [each.request.known_tokens for each in job.requests if not each.prefilled]
            self._reclaim(sum(tokens) or len(job.requests), hosted.name)
            asyncio.get_running_loop().call_later(SHORT_S, self._requests.wake)
        self._consult()

    def _consult(self, *, changed: bool = False) -> None:
        if self._closed:
            return
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
        ready = {hosted.name: engine.id for hosted, engine in self._views.ready()}
        for engine_id in {*self._jobs, *self._limits}.difference(ready.values()):
            self.forget(engine_id)
        self._views.unreachable.intersection_update(engine.id for engine in self._state.pool)
        return ready.keys()

    def view(self) -> DeviceStepView:
        return self._views.view(self._jobs, self._short_s.keys(), admits=self._admits)

    def start(self, job: StepJob, *, repeats: bool) -> bool:
        hosted = self._state.models.hosted[job.model]
        found = [self._requests.get(request_id) for request_id in job.requests]
        requests = [each for each in found if each is not None]
        waiting = [each.id for each in requests if each.state is RequestState.WAITING]
        admitting = self._requests.admit(waiting)
        requests = [each for each in requests if each.state is not RequestState.WAITING]
        new = EngineJob(requests, job.sm_share, repeats)
        if not requests or not (admitting or self._send(hosted.engine_id, job.phase, new)):
            self._short_s[job.model] = self._state.now_s()
            return False
        self._jobs.setdefault(hosted.engine_id, {})[job.phase] = new
        self._admitting += admitting
        return True

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
        self._views.reset_peaks()
        for hosted, engine in self._views.ready():
            if engine.activated is None or hosted.name not in quotas:
                continue
            limit_bytes = max(quotas[hosted.name], engine.activated.reserve_bytes)
            if self._limits.get(engine.id) != limit_bytes:
                self._limits[engine.id] = limit_bytes
                self._engines.send(engine.id, SetLimit(limit_bytes))

    def expire_after(self, seconds: float, choice: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expired, choice)

    def _send(self, engine_id: str, phase: Phase, job: EngineJob) -> bool:
        job.is_sent = True
        steps = 1 if phase is Phase.DECODE and not job.repeats else 0
        ids = [each.id for each in job.requests]
        is_sent = self._engines.send(engine_id, StartJob(phase.value, ids, steps))
        if not is_sent:
            self._views.unreachable.add(engine_id)
        return is_sent
