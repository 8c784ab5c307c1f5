"""Simulated cluster: arrivals, queues and engines, run by the live system's schedulers.

`Planner` runs the same `ClusterScheduler` as `prism-serve`, and each device the same
`LocalScheduler`.
"""

from __future__ import annotations

from collections.abc import Callable

from prism.policies import registry
from prism.policies.data import Refuse
from prism.policies.knobs import tuned
from prism.policies.placement import Placement
from prism.policies.policy import Policy
from prism.scheduler.decision_journal import MemoryJournal
from prism_sim.cluster.actuator import Hooks, SimActuator
from prism_sim.cluster.bindings import Bindings
from prism_sim.cluster.controller import SimController
from prism_sim.cluster.copies import SimModel
from prism_sim.cluster.device import Resident, SimDevice
from prism_sim.cluster.engines import EngineTerms, make_engine
from prism_sim.cluster.parts import ClusterParts
from prism_sim.cluster.planner import Planner
from prism_sim.cluster.turns.turn_pool import TurnPool
from prism_sim.core.kernel import Kernel
from prism_sim.core.profile import ModelLoad, loads
from prism_sim.core.records import Records
from prism_sim.core.request import Listener, SimRequest
from prism_sim.core.setup import ClusterSetup
from prism_sim.core.workload import NO_SLO, Workload
from prism_sim.engine.compute import Compute, Gpu
from prism_sim.engine.engine import SimEngine
from prism_sim.placement.replacement import Replacement
from prism_sim.placement.search import problem

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
        self.models = [SimModel(model) for model in setup.models]
        parts = ClusterParts(
            self.kernel, setup, self.policy, self.models, self.devices, self.records
        )
        self._turns = TurnPool(parts) if self.policy.turns is not None else None
        searches = self.policy.search is not None or self.policy.steps is not None
        self._loads = loads(setup, work) if searches else None
        fixed = target is not None or self.policy.next_interval is None or self._loads is None
        self._replacement = (
            None if fixed else Replacement(self.policy, setup, self.records, self._loads or [])
        )
        self._bindings = None
        if self.policy.assign is not None and self._loads is not None:
            self._bindings = Bindings(self.policy.assign, parts, self._loads)
        self._actuator = SimActuator(parts, Hooks(self._route, self._wake, self._engine))
        self.controller = SimController(parts, self._actuator, self._bindings, target or start)
        self._planner = Planner(parts, self.controller, self._start_bound, self._has_ended)
        self._left_out: set[int] = set()
        self._hashes = work.hashes if setup.engine.prefix_reuse else ()
        # Index -> model with requests since the last sample.
        self._held: dict[int, SimModel] = {}
        self._next, self._requests = 0, len(work)
        self.progress: Callable[[int, int], None] | None = None

    def _has_ended(self) -> bool:
        """Returns whether all requests have ended."""
        return self.records.ended == self._requests

    def run(self) -> Records:
        """Runs the simulation until all requests end. Those that cannot be served end with an
        error."""
        self.place()
        if self.controller.target is not None:
            self._begin(self.controller.target)
        self._planner.plan()
        self._actuator.instant = False
        if self._replacement is not None:
            self.kernel.after(self._replacement.interval_s, self._replace, self._replacement)
        self.kernel.at(max(0.0, self.work.arrival_s[0]), self._arrive)
        self._planner.start()
        self._sample()
        horizon_s = self.work.end_s + self.setup.patience_s
        self.kernel.run(horizon_s)
        if not self._has_ended():
            # The time of the last event is not used, since it depends on `steps`.
            self.kernel.time_s = horizon_s
            self._fail_open_requests()
        self.records.events = self.kernel.events
        return self.records

    def place(self) -> Placement | None:
        """Returns the placement, after a search if the policy has one and none was given."""
        controller, searches = self.controller, self.policy.search
        if controller.target is None and searches is not None and self._loads is not None:
            given = problem(self.setup, self.policy, self._loads, self._simulate, self.work)
            controller.target = searches(given)
        return controller.target

    def _begin(self, target: Placement) -> None:
        """Starts with a placement. Refuses the models that a permanent placement leaves out."""
        if holder := self._bindings or self._turns:
            holder.begin(target)
        if self._replacement is None and self.policy.search is not None:
            housed = {hosted.model for unit in target.units for hosted in unit.models}
            for model in self.models:
                if model.setup.name not in housed:
                    self._left_out.add(model.setup.index)
                    why = target.refused.get(model.setup.name, "the placement leaves it out")
                    self.controller.refuse(model, Refuse(model.setup.name, why))

    def _replace(self, replacement: Replacement) -> None:
        """Searches the placement again, periodically while requests arrive."""
        before = self.controller.target
        assert before is not None
        target = replacement.update(self.kernel.time_s, self._next, before, self._simulate)
        if target.units != before.units:
            self.records.count("replacements")
        self.controller.target = target
        self._planner.plan()
        if self._next < self._requests:
            self.kernel.after(replacement.interval_s, self._replace, replacement)

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
        refusal = model.setup.refusal(request.prompt_tokens + request.output_tokens)
        if refusal or request.model in self._left_out or model.rejects(request, self.kernel.time_s):
            self.records.finish(request, self.kernel.time_s, refusal or "unserved")
            return
        if self._turns is not None:
            self._turns.submit(model.setup, request)
            return
        model.note_arrival(request, self.kernel.time_s)
        self.controller.growing[request.model] = self._held[request.model] = model
        target = None if self._bindings else model.copy_for(request.hashes, self.kernel.time_s)
        if target is None:
            model.unplaced[request.index] = request
            # Later requests do not change the plan; it is retried every retry_s.
            if len(model.unplaced) == 1 or self._bindings is not None:
                self._planner.wake()
        else:
            target.home.on_arrival(target, request)
            if target.grew_to(self.setup.settings.contended_requests):
                self._planner.alarm.after(max(0.0, target.saturated_s - self.kernel.time_s))

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
            self._planner.wake()

    def _wake(self) -> None:
        """Wakes the cluster scheduler, which is made after the actuator that calls this."""
        self._planner.wake()

    def _start_bound(self) -> None:
        """Starts requests of virtual queues whose model is active."""
        if self._bindings is None:
            return
        started = self._bindings.starting()
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
        terms = EngineTerms(self.setup, self.policy, load, self.controller.target)
        return make_engine(resident, compute, terms, listener)

    def _listener(self, model: SimModel, resident: Resident) -> Listener:
        def ended(request: SimRequest) -> None:
            resident.home.note_change()
            resident.last_use_s = self.kernel.time_s
            model.traffic.ended(request.output_tokens, self.kernel.time_s)
            self.records.finish(request, self.kernel.time_s)
            self._actuator.request_ended(model, resident)
            if self._bindings is not None and not resident.running:
                self._planner.wake()

        def freed() -> None:
            if self._actuator.queue.waiting:
                self._actuator.queue.retry()
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
        sample = self.controller.viewer.sample(self.kernel.time_s, held)
        self.records.samples.append(self._turns.with_counts(sample) if self._turns else sample)
        left = (m for m in held if m.busy or m.setup.index in sample.kv_bytes)
        self._held = {model.setup.index: model for model in left}
        if not self._has_ended():
            self.kernel.after(max(SAMPLE_S, self.work.end_s / SAMPLES), self._sample)
