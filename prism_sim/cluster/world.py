"""Simulated cluster: arrivals, queues and engines, run by the live system's schedulers.

`World` is the `ClusterPort` (`scheduler/ports.py`) of the same `ClusterScheduler` that
`prism-serve` runs; each device steps the same `LocalScheduler`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prism.policies import registry
from prism.policies.data import Action, Activate, ClusterView, DeviceLoad, Evict, Migrate, Refuse
from prism.policies.knobs import tuned
from prism.policies.placement import Placement
from prism.policies.policy import Policy
from prism.scheduler.cluster import ClusterScheduler
from prism.scheduler.journal import MemoryJournal
from prism.scheduler.rates import TokenRates
from prism_sim.cluster.bindings import Bindings
from prism_sim.cluster.copies import SimModel
from prism_sim.cluster.device import Resident, SimDevice, Stage
from prism_sim.cluster.engines import EngineTerms, make_engine
from prism_sim.cluster.moves import Hooks, SimActuator
from prism_sim.cluster.turns import TurnPool
from prism_sim.cluster.view import Viewer
from prism_sim.core.kernel import Alarm, Kernel
from prism_sim.core.profile import ModelLoad, loads
from prism_sim.core.records import Decision, Records
from prism_sim.core.request import Listener, SimRequest
from prism_sim.core.setup import ClusterSetup
from prism_sim.core.workload import NO_SLO, Workload
from prism_sim.engine.compute import Compute, Gpu
from prism_sim.engine.engine import SimEngine
from prism_sim.placement.replacement import Replacement
from prism_sim.placement.search import search

SAMPLE_S = 1.0
SAMPLES = 200


class World:
    """Simulation of one workload, which runs once.

    Args:
        target: Permanent placement, instead of a search by the policy.
        start: Initial placement, used until the policy searches again.
        keep_queues: Record the queue of each device with its inputs in `queues`.

    `progress` is called periodically with (requests ended, requests).
    """

    def __init__(
        self,
        setup: ClusterSetup,
        work: Workload,
        policy: Policy | None = None,
        target: Placement | None = None,
        *,
        keep_queues: bool = False,
        start: Placement | None = None,
    ) -> None:
        self.setup = setup
        self.work = work
        self.policy = policy or tuned(registry.get(setup.policy), setup.knobs)
        self.kernel = Kernel()
        self.records = Records(work)
        self.queues = (
            {d.name: MemoryJournal(inputs=True) for d in setup.devices} if keep_queues else {}
        )
        shared = {d.processor: Gpu(d.processor) for d in setup.devices if d.processor}
        self.devices = [
            SimDevice(
                self.kernel,
                number,
                device,
                self.policy,
                setup.limits,
                gpu=shared.get(device.processor),
                journal=self.queues.get(device.name),
            )
            for number, device in enumerate(setup.devices)
        ]
        self.by_name = {device.name: device for device in self.devices}
        self.models = [SimModel(model) for model in setup.models]
        self._model_of = {model.setup.name: model for model in self.models}
        self._turns = None
        if self.policy.turns is not None:
            self._turns = TurnPool(self.kernel, self.policy, setup, self.devices, self.records)
        hooks = Hooks(self._route, self._wake, self._engine)
        searches = self.policy.search is not None or self.policy.steps is not None
        self._loads = loads(setup, work) if searches else None
        fixed = target is not None or self.policy.next_interval is None or self._loads is None
        self._replacement = (
            None if fixed else Replacement(self.policy, setup, self.records, self._loads or [])
        )
        self._target = target or start
        self._bindings = self._make_bindings()
        self._moves = SimActuator(self.kernel, setup, self.policy, self.records, hooks)
        self._viewer = Viewer(
            self.models, self.devices, setup if self.policy.asks_startup else None
        )
        self._rates = TokenRates(setup.rate_window_s)
        self._scheduler = ClusterScheduler(self, self.policy, setup.settings, setup.interval_s)
        self._left_out: set[int] = set()
        self._hashes = work.hashes if setup.engine.prefix_reuse else ()
        # Index -> model with requests since the last token count, or since the last sample.
        self._growing, self._held = dict[int, SimModel](), dict[int, SimModel]()
        self._next, self._requests, self._wake_due = 0, len(work), False
        # Some inputs of the scheduler, such as idle times, change without an event.
        self._alarm = Alarm(self.kernel, self._tick)
        self.progress: Callable[[int, int], None] | None = None

    @property
    def open_requests(self) -> int:
        return self._next - self.records.ended

    def run(self) -> Records:
        """Runs the simulation until all requests end. Those that cannot be served end with an
        error."""
        self.place()
        if self._target is not None:
            self._begin(self._target)
        self._plan()
        self._moves.instant = False
        if self._replacement is not None:
            self.kernel.after(self._replacement.interval_s, self._replace, self._replacement)
        self.kernel.at(max(0.0, self.work.arrival_s[0]), self._arrive)
        self._alarm.after(self._pause_s())
        self._sample()
        horizon_s = self.work.end_s + self.setup.patience_s
        self.kernel.run(horizon_s)
        if self.open_requests:
            # The time of the last event is not used, since it depends on `steps`.
            self.kernel.time_s = horizon_s
            self._fail_open_requests()
        self.records.events = self.kernel.events
        return self.records

    def place(self) -> Placement | None:
        """Returns the placement, after a search if the policy has one and none was given. Called by
        `run`."""
        if self._target is None and self.policy.search is not None and self._loads is not None:
            self._target = search(
                self.policy.search, self.setup, self._loads, self._simulate, self.work
            )
        return self._target

    def _begin(self, target: Placement) -> None:
        """Starts with a placement. Refuses the models that a permanent placement leaves out."""
        if self._bindings is not None:
            self._bindings.begin(target)
        if self._replacement is None and self.policy.search is not None:
            housed = {hosted.model for unit in target.units for hosted in unit.models}
            for model in self.models:
                if model.setup.name not in housed:
                    self._left_out.add(model.setup.index)
                    why = target.refused.get(model.setup.name, "the placement leaves it out")
                    self._refuse(model, Refuse(model.setup.name, why))

    # --- requests ---------------------------------------------------------------------------

    def _arrive(self) -> None:
        work, index = self.work, self._next
        self._next = index + 1
        if self._next < self._requests:
            self.kernel.at(work.arrival_s[self._next], self._arrive)
        if self.progress is not None and index % 4096 == 0:
            self.progress(self.records.ended, self._requests)
        model = self.models[work.model[index]]
        arrival_s, slo_s = work.arrival_s[index], work.slo_ttft_s[index]
        deadline_s = arrival_s + (model.setup.slo_ttft_s if slo_s == NO_SLO else slo_s)
        request = SimRequest(
            index,
            work.model[index],
            arrival_s,
            prompt_tokens=work.prompt_tokens[index],
            output_tokens=work.output_tokens[index],
            deadline_s=deadline_s,
            priority=work.priority[index],
            hashes=self._hashes[index] if self._hashes else (),
        )
        if model.setup.request_s:
            self.kernel.after(model.setup.request_s, self._submit, model, request)
        else:
            self._submit(model, request)

    def _submit(self, model: SimModel, request: SimRequest) -> None:
        """Routes a request to the queue of a copy, or lets it wait for a copy."""
        if request.model in self._left_out:
            self.records.finish(request, self.kernel.time_s, "unserved")
            return
        if self._turns is not None:
            self._turns.submit(model.setup, request)
            return
        model.last_use_s = self.kernel.time_s
        self._growing[request.model] = self._held[request.model] = model
        target = None if self._bindings else model.copy_for(request.hashes, self.kernel.time_s)
        if target is None:
            model.unplaced[request.index] = request
            # Later requests do not change the plan; it is retried every retry_s.
            if len(model.unplaced) == 1 or self._bindings is not None:
                self._wake()
        else:
            target.home.on_arrival(target, request)
            if target.grew_to(self.setup.settings.contended_requests):
                self._alarm.after(max(0.0, target.saturated_s - self.kernel.time_s))

    def _route(self, model: SimModel) -> None:
        """Sends unplaced requests to a copy that takes requests. Wakes the scheduler if none
        does."""
        homes: dict[SimDevice, None] = {}
        while self._bindings is None and model.unplaced and (target := model.least_loaded()):
            request = model.unplaced.pop(next(iter(model.unplaced)))
            target.home.enqueue(target, request)
            homes[target.home] = None
        for home in homes:
            home.try_dispatch()
        if model.unplaced:
            self._wake()

    def _make_bindings(self) -> Bindings | None:
        if self.policy.assign is None or self._loads is None:
            return None
        return Bindings(self.policy.assign, self.setup, self._loads, self.models, self.by_name)

    def _start_bound(self, bindings: Bindings) -> None:
        """Starts requests of virtual queues whose model is active."""
        started = bindings.starting()
        for resident, request in started:
            resident.home.enqueue(resident, request)
        for home in dict.fromkeys(resident.home for resident, _ in started):
            home.try_dispatch()

    def _simulate(self, target: Placement, work: Workload) -> Records:
        """Simulates a workload on a placement under this policy."""
        return World(self.setup, work, self.policy, target).run()

    def _engine(self, model: SimModel, resident: Resident, compute: Compute) -> SimEngine:
        listener = self._listener(model, resident)
        load = self._loads[model.setup.index] if self._loads is not None else ModelLoad()
        terms = EngineTerms(self.setup, self.policy, load, self._target)
        return make_engine(resident, compute, terms, listener)

    def _listener(self, model: SimModel, resident: Resident) -> Listener:
        def ended(request: SimRequest) -> None:
            resident.home.note_change()
            resident.last_use_s = self.kernel.time_s
            self.records.finish(request, self.kernel.time_s)
            self._moves.request_ended(model, resident)
            if self._bindings is not None and not resident.running:
                self._wake()

        def freed() -> None:
            if self._moves.waits_for_memory:
                self._moves.memory_freed()
            # Tensor-parallel copies share several devices: each home dispatches only once.
            homes = resident.home.homes
            if len(resident.devices) > 1:
                homes = tuple(dict.fromkeys([h for d in resident.devices for h in d.homes]))
            for device in homes:
                device.try_dispatch()

        def retracted(request: SimRequest) -> None:
            self.records.count("retractions")

        return Listener(ended=ended, retracted=retracted, freed=freed)

    def _fail_open_requests(self) -> None:
        """Ends all open requests with `unserved`."""
        left = [request for model in self.models for request in model.withdraw_all()]
        for request in left if self._turns is None else self._turns.requests():
            self.records.finish(request, self.kernel.time_s, "unserved")

    def _sample(self) -> None:
        """Records a sample of the cluster, about SAMPLES times in the run."""
        held = [self._held[index] for index in sorted(self._held)]
        sample = self._viewer.sample(self.kernel.time_s, held)
        self.records.samples.append(self._turns.with_counts(sample) if self._turns else sample)
        left = (m for m in held if m.busy or m.setup.index in sample.kv_bytes)
        self._held = {model.setup.index: model for model in left}
        if self._next < self._requests or self.open_requests:
            self.kernel.after(max(SAMPLE_S, self.work.end_s / SAMPLES), self._sample)

    # --- cluster scheduler ------------------------------------------------------------------

    def view(self) -> ClusterView:
        now_s = self.kernel.time_s
        self._observe(now_s)
        models = self._viewer.models(now_s, self._rates.rates(now_s))
        queues = self._bindings.assign(now_s) if self._bindings is not None else ()
        gpus = self._viewer.gpus()
        return ClusterView(now_s, models, gpus, target=self._target, queues=queues, replicas=True)

    def apply(self, action: Action) -> None:
        model = self._model_of[action.model]
        if isinstance(action, Refuse):
            self._refuse(model, action)
            return
        if isinstance(action, Activate):
            self._decide("activate", action.model, action.device, "", action.reason)
            devices = [self.by_name[name] for name in (action.device, *action.peers)]
            self._moves.activate(model, devices, action.kv_limit_bytes, action.joins)
        elif isinstance(action, Evict):
            self._decide("evict", action.model, action.device, "", action.reason)
            resident = self._resident(model, action.device)
            if resident is not None:
                self._moves.evict(model, resident, action.move_running)
        else:
            self._migrate(model, action)

    def _migrate(self, model: SimModel, action: Migrate) -> None:
        self._decide("migrate", action.model, action.source, action.target, action.reason)
        devices = [self.by_name[name] for name in (action.target, *action.peers)]
        source = self._resident(model, action.source)
        if source is not None and source.replaced_by is None:
            self._moves.migrate(model, source, devices, action.move_running)

    def _decide(self, kind: str, model: str, device: str, target: str, reason: str) -> None:
        self.records.decide(Decision(self.kernel.time_s, kind, model, device, target, reason))

    def _refuse(self, model: SimModel, action: Refuse) -> None:
        if model.refusal != action.reason:
            model.refusal = action.reason
            self._decide("refuse", action.model, "", "", action.reason)
        if self.policy.evicts:
            # The model is activated once a request arrives, for which others may be evicted.
            model.wanted = False

    def _resident(self, model: SimModel, device: str) -> Resident | None:
        """Returns the active copy that an action names. Records a failure, as an agent reports it,
        and returns None if there is none any more."""
        for resident in model.residents:
            if resident.home.name == device and resident.stage is Stage.ACTIVE:
                return resident
        self._decide("failed", model.setup.name, device, "", "no active copy is there")
        return None

    def _observe(self, now_s: float) -> None:
        """Updates the token rates from the tokens per model: prompts of admitted requests and
        output."""
        grown: dict[str, int] = {}
        for index, model in list(self._growing.items()):
            total = model.tokens_total
            for resident in model.residents:
                if (engine := resident.engine) is not None:
                    total += engine.prompt_tokens_total + engine.output_tokens()
            if total != model.tokens_seen:
                grown[model.setup.name] = model.tokens_seen = total
            if not model.busy:
                del self._growing[index]
        self._rates.observe("cluster", 1, grown, now_s)

    def _wake(self) -> None:
        """Schedules a plan after all events of the present time."""
        if not self._wake_due:
            self._wake_due = True
            self.kernel.after(0.0, self._on_wake)

    def _on_wake(self) -> None:
        self._wake_due = False
        policy, needed = self.policy, self._needs_copy()
        due = policy.search is not None or self._scheduler.due(self.kernel.time_s)
        if needed or due or policy.is_balanced is None:
            self._plan()
        if needed:
            self._alarm.after(self._pause_s())

    def _replace(self, replacement: Replacement) -> None:
        """Searches the placement again, periodically while requests arrive."""
        assert self._target is not None
        target = replacement.update(self.kernel.time_s, self._next, self._target, self._simulate)
        if target.units != self._target.units:
            self.records.count("replacements")
        self._target = target
        self._plan()
        if self._next < self._requests:
            self.kernel.after(replacement.interval_s, self._replace, replacement)

    def _tick(self) -> None:
        if not self._is_balanced():
            self._plan()
        if self._next < self._requests or self.open_requests:
            self._alarm.after(self._pause_s())

    def _is_balanced(self) -> bool:
        """Returns True if the policy would plan nothing. Avoids views of the whole cluster."""
        is_balanced, settings = self.policy.is_balanced, self.setup.settings
        if is_balanced is None or self._needs_copy():
            return False
        return is_balanced(self._device_loads(), settings)

    def _needs_copy(self) -> bool:
        """Returns whether some model should be activated."""
        return any(model.needs_copy for model in self.models)

    def _device_loads(self) -> Iterator[DeviceLoad]:
        """Yields the device loads, computed only if the policy reads them."""
        now_s = self.kernel.time_s
        self._observe(now_s)
        yield from self._viewer.loads(now_s, self._rates.rates(now_s), self.setup.settings)

    def _pause_s(self) -> float:
        """Returns the time to the next plan. It is shorter if requests wait for a copy, or if the
        policy adds copies for a backlog."""
        soon = self.policy.asks_startup or any(model.unplaced for model in self.models)
        return self.setup.retry_s if soon else self.setup.interval_s

    def _plan(self) -> None:
        self._scheduler.step(self.kernel.time_s)
        self._alarm.after(self._scheduler.next_step_in_s)
        if self._bindings is not None:
            self._start_bound(self._bindings)
