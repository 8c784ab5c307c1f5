"""Engine whose steps a policy controls, and the port of a device's control loop (MuxServe §3.3,
SeaLLM §4.2, AlpaServe's temporal sharing).

The control includes admission: requests wait in the engine until it selects them for a prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from prism.policies.multiplexing.steps import (
    DeviceStepView,
    EngineStepView,
    Phase,
    StepJob,
    StepRequest,
)
from prism_sim.core.kernel import Kernel
from prism_sim.core.profile import ModelLoad
from prism_sim.core.request import SimRequest
from prism_sim.core.setup import UNBOUNDED_STEPS
from prism_sim.engine.compute import Gpu
from prism_sim.engine.engine import SimEngine
from prism_sim.engine.memory import Ledger
from prism_sim.engine.prompts import Chunks


class ControlledEngine(SimEngine):
    """Engine that starts steps only on request. Prefill and decode run concurrently, or one step
    after the other if `serial_phases` is set: a prefill then waits for the end of the decode step
    in flight, and a decode for the end of the prefill, after which the control chooses again.

    The engine's clock counts decode time for all members of the batch. A member's executed_s has
    the clock subtracted when it joins; the clock is added back when it leaves.
    """

    def configure(self, load: ModelLoad, sm_share: float) -> None:
        """Sets the data that the control gets about the model. REQUIRES: called once, first."""
        self.load = load
        self.decode_sm_share = sm_share
        self.waiting: dict[int, SimRequest] = {}
        # Requests with KV that the last decode step left out.
        self.parked: dict[int, SimRequest] = {}
        # True after a prefill found no memory. Waiting requests are then hidden from the control
        # until something changes, since it counts tokens while the ledger grants quanta.
        self.lacks_memory = False
        # Prefill that waits for the end of a decode step, and whether a decode waits for a prefill.
        self._prefill_due: Chunks = []
        self._decode_due = False
        # SM shares of the last job of each phase.
        self._shares: dict[Phase, float] = {}
        self._clock_s = 0.0
        self._decode_since_s = 0.0
        # The view of the engine without requests, and its KV memory and peak then.
        self._idle_view: tuple[tuple[int, int], EngineStepView] | None = None

    @property
    def busy(self) -> frozenset[Phase]:
        """Phases with a job in flight or due."""
        prefill = self._chunks or self._prefill_due
        found = ((Phase.PREFILL, prefill), (Phase.DECODE, self.run.job or self._decode_due))
        return frozenset(phase for phase, job in found if job)

    def sm_held(self) -> float:
        """Returns the part of the SMs that its jobs hold."""
        return sum(self._shares[phase] for phase in self.busy)

    def requests(self) -> list[SimRequest]:
        return [*super().requests(), *self.parked.values(), *self.waiting.values()]

    def admit(self, requests: Iterable[SimRequest]) -> None:
        for request in requests:
            self.running += 1
            request.last_s = request.arrival_s
            self.waiting[request.index] = request
        self.run.end_run()

    def readmit(self) -> None:
        """Moves retracted requests to the front of the waiting ones."""
        if not self.prompts.retracted:
            return
        back = {request.index: request for request in self.prompts.take_retracted()}
        for request in back.values():
            request.last_s = self._kernel.time_s
        self.waiting = {**back, **self.waiting}

    def start_next(self) -> None:
        """Reports idleness if the engine is stopping. Steps start only on request."""
        if self.stopping and not self.busy:
            self._report_idle()

    def release(self) -> list[SimRequest]:
        for request in self.batch.members.values():
            request.executed_s += self._clock_s
        parked, waiting = list(self.parked.values()), list(self.waiting.values())
        for request in parked:
            self.kv.release(request, self._kernel.time_s)
        self.parked.clear()
        self.waiting.clear()
        self.running -= len(parked) + len(waiting)
        return [*super().release(), *parked, *waiting]

    def take_over(self, requests: Iterable[SimRequest]) -> None:
        """Takes requests of another engine. Those with KV are parked, the others wait."""
        moved: dict[int, SimRequest] = {}
        for request in requests:
            self.running += 1
            if request.todo_tokens == 0 and self.kv.take(self.kv.blocks(request.kv_tokens)):
                self.parked[request.index] = request
                continue
            if request.todo_tokens == 0:
                request.forget_kv()
            moved[request.index] = request
        self.waiting = {**moved, **self.waiting}
        self.run.end_run()

    # --- jobs -------------------------------------------------------------------------------

    def prefill_now(self, ids: Sequence[str], sm_share: float) -> bool:
        """Starts one step of the named whole prompts whose KV fits. Returns False if none fits."""
        assert not self.stopping
        chunks: Chunks = []
        for key in ids:
            request = self.waiting.get(int(key))
            if request is None or not self.kv.take(self.kv.blocks(request.kv_tokens)):
                continue
            del self.waiting[request.index]
            if request.started_s < 0:
                request.started_s = self._kernel.time_s
                self.prompt_tokens_total += request.prompt_tokens
            self.prompts.ready.append(request)
            chunks.append((request, request.todo_tokens))
        if not chunks:
            return False
        self._shares[Phase.PREFILL] = sm_share
        if self._settings.serial_phases and self.run.job is not None:
            self._prefill_due = chunks
            self.run.end_run()
        else:
            self._prefill_step(chunks, 0, sm_share)
        return True

    def decode_now(self, ids: Sequence[str], sm_share: float, steps_max: int) -> bool:
        """Starts decode steps of the named requests and parks the others. Returns False if no step
        could start."""
        assert not self.stopping
        chosen = {int(key) for key in ids}
        for request in [r for i, r in self.batch.members.items() if i not in chosen]:
            self._leave(request)
            self.parked[request.index] = request
        for index in [i for i in self.parked if i in chosen]:
            self._join(self.parked.pop(index))
        if not self.batch:
            return False
        self._shares[Phase.DECODE] = sm_share
        if self._settings.serial_phases and Phase.PREFILL in self.busy:
            self._decode_due = True
            return True
        self._decode_since_s = self._kernel.time_s
        return self._start_decode(min(steps_max, self._settings.run_steps), sm_share)

    def _prefill_ended(self) -> None:
        self._decode_due = False
        seconds = self._kernel.time_s - self._prefill_since_s
        for request, _ in self._chunks:
            request.executed_s += seconds
            request.last_s = self._kernel.time_s
        super()._prefill_ended()

    def _decode_ended(self) -> None:
        now_s = self._kernel.time_s
        self._clock_s += now_s - self._decode_since_s
        for request in self.batch.members.values():
            request.last_s = now_s
        for request in self.batch.deferred:
            request.executed_s -= self._clock_s
        ends = self.batch.steps_to_end() == self.run.steps
        if self._prefill_due:
            due, self._prefill_due = self._prefill_due, []
            self._prefill_step(due, 0, self._shares[Phase.PREFILL])
        super()._decode_ended()
        if not ends:
            self._listener.freed()

    def _emit_token(self, request: SimRequest) -> None:
        joins = self.run.job is None and request.generated + 1 < request.output_tokens
        super()._emit_token(request)
        if joins:
            request.executed_s -= self._clock_s

    def _leave(self, request: SimRequest) -> None:
        self.batch.leave(request)
        request.executed_s += self._clock_s
        self.run.usage_changed = True

    def _join(self, request: SimRequest) -> None:
        self.batch.join(request)
        request.executed_s -= self._clock_s
        self.run.usage_changed = True

    def _retract(self, victim: SimRequest) -> None:
        victim.executed_s += self._clock_s
        super()._retract(victim)

    # --- view -------------------------------------------------------------------------------

    def step_view(self, model: str) -> EngineStepView:
        if self.running:
            return self._view(model)
        memory = (self.kv.kv_bytes, self.kv.peak_bytes)
        if self._idle_view is None or self._idle_view[0] != memory:
            self._idle_view = (memory, self._view(model))
        return self._idle_view[1]

    def _view(self, model: str) -> EngineStepView:
        busy, kv, load = self.busy, self.kv, self.load
        decodes = self._decodes(Phase.DECODE in busy)
        token_bytes = max(1, kv.quantum_bytes // kv.quantum_tokens)
        return EngineStepView(
            model,
            () if self.lacks_memory else self._views(self.waiting.values()),
            decodes,
            busy,
            token_bytes,
            kv.kv_bytes,
            kv.peak_bytes,
            load.rate_rps * (load.prompt_tokens + load.output_tokens) * token_bytes,
            self.decode_sm_share,
            self.max_running,
            load.execution_s,
            load.execution_std_s,
            self.running - len(self.waiting) - len(decodes),
        )

    def _views(self, requests: Iterable[SimRequest], tokens: int = 0) -> tuple[StepRequest, ...]:
        now_s = self._kernel.time_s
        return tuple(
            [
                StepRequest(
                    str(r.index),
                    r.arrival_s,
                    r.prompt_tokens,
                    r.kv_tokens + tokens,
                    r.executed_s,
                    now_s - r.last_s,
                )
                for r in requests
            ]
        )

    def _decodes(self, stepping: bool) -> tuple[StepRequest, ...]:
        """Returns the decoding requests, oldest first. Members of the batch have stale tokens and
        times, so the batch's step and the engine's clock are added."""
        parked = self._views(self.parked.values(), 1)
        if stepping:
            return parked
        now_s, step, clock_s = self._kernel.time_s, self.batch.step + 1, self._clock_s
        shown = [
            StepRequest(
                str(r.index),
                r.arrival_s,
                r.prompt_tokens,
                r.kv_tokens + step - r.join_step,
                r.executed_s + clock_s,
                now_s - r.last_s,
            )
            for r in self.batch.members.values()
        ]
        shown += parked
        shown.sort(key=_by_arrival)
        return tuple(shown)


def _by_arrival(request: StepRequest) -> tuple[float, str]:
    return (request.arrival_s, request.id)


class ControlledDevice:
    """`StepPort` (`prism/scheduler/step_loop.py`) of a simulated device.

    Args:
        gpu: Its processor. None: it shares one with other devices, whose jobs it does not know.
        expired: called at the end of a choice's `holds_s`, with the number of the choice.
    """

    def __init__(
        self, kernel: Kernel, gpu: Gpu | None, ledger: Ledger, expired: Callable[[int], None]
    ) -> None:
        self._kernel = kernel
        self._gpu = gpu
        self._ledger = ledger
        self._expired = expired
        self._busy: list[ControlledEngine] = []
        # Model -> engine. Set before each consultation.
        self.engines: Mapping[str, ControlledEngine] = {}

    def models(self) -> Set[str]:
        return self.engines.keys()

    def view(self) -> DeviceStepView:
        self._busy = [engine for engine in self.engines.values() if engine.running]
        for engine in self._busy:
            engine.readmit()
            engine.run.catch_up()
        static_bytes = sum(account.static_bytes for account in self._ledger.accounts.values())
        return DeviceStepView(
            self._kernel.time_s,
            tuple(engine.step_view(name) for name, engine in self.engines.items()),
            self._ledger.capacity_bytes - static_bytes,
            max(0.0, 1.0 - self._sm_held()),
        )

    def _sm_held(self) -> float:
        if self._gpu is not None:
            return self._gpu.sm_held()
        return sum(engine.sm_held() for engine in self._busy)

    def start(self, job: StepJob, *, repeats: bool) -> bool:
        engine = self.engines[job.model]
        if job.phase is Phase.PREFILL:
            started = engine.prefill_now(job.requests, job.sm_share)
            engine.lacks_memory = not started
            return started
        # If all requests were retracted, they wait again.
        return engine.decode_now(job.requests, job.sm_share, UNBOUNDED_STEPS if repeats else 1)

    def retracted(self) -> bool:
        return any(engine.prompts.retracted for engine in self._busy)

    def end_runs(self, *, changed: bool) -> None:
        for engine in self.engines.values():
            engine.run.end_run()
            if changed:
                engine.lacks_memory = False

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Starts new measurements of peaks: admission by the control enforces the quotas."""
        for engine in self.engines.values():
            engine.kv.reset_peak()

    def expire_after(self, seconds: float, choice: int) -> None:
        self._kernel.after(seconds, self._expired, choice)
