"""Views and actions of the cluster scheduler on the simulated cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prism.policies.data import Action, Activate, ClusterView, DeviceLoad, Evict, Migrate, Refuse
from prism.policies.placement import Placement
from prism.scheduler.rates import TokenRates
from prism_sim.cluster.actuator import SimActuator
from prism_sim.cluster.bindings import Bindings
from prism_sim.cluster.copies import SimModel
from prism_sim.cluster.device import Resident, Stage
from prism_sim.cluster.parts import ClusterParts
from prism_sim.cluster.view import Viewer
from prism_sim.core.records import Decision
from prism_sim.placement.search import expected_traffic


class SimController:
    """`ClusterPort` (`prism/scheduler/ports.py`) of the simulated cluster."""

    def __init__(
        self,
        parts: ClusterParts,
        actuator: SimActuator,
        bindings: Bindings | None,
        target: Placement | None,
    ) -> None:
        setup, policy = parts.setup, parts.policy
        self._kernel = parts.kernel
        self._settings = setup.settings
        self._evicts = policy.evicts
        self._records = parts.records
        self._models = {model.setup.name: model for model in parts.models}
        self._devices = {device.name: device for device in parts.devices}
        self._actuator = actuator
        self._bindings = bindings
        # Placement that views have.
        self.target = target
        self.viewer = Viewer(
            parts.models,
            parts.devices,
            setup if policy.asks_startup else None,
            expected_traffic(setup, parts.records.work) if policy.asks_expected else {},
        )
        self._rates = TokenRates(setup.rate_window_s)
        # Index -> model with requests since the last token count.
        self.growing: dict[int, SimModel] = {}

    def view(self) -> ClusterView:
        now_s = self._kernel.time_s
        self._observe(now_s)
        models = self.viewer.models(now_s, self._rates.rates(now_s))
        queues = self._bindings.assign(now_s) if self._bindings is not None else ()
        gpus = self.viewer.gpus()
        return ClusterView(now_s, models, gpus, target=self.target, queues=queues)

    def loads(self) -> Iterator[DeviceLoad]:
        """Yields the device loads, computed only if the policy reads them."""
        now_s = self._kernel.time_s
        self._observe(now_s)
        yield from self.viewer.loads(now_s, self._rates.rates(now_s), self._settings)

    def apply(self, action: Action) -> None:
        model = self._models[action.model]
        if isinstance(action, Refuse):
            self.refuse(model, action)
            return
        if isinstance(action, Activate):
            self._decide("activate", action.model, action.device, "", action.reason)
            devices = [self._devices[name] for name in (action.device, *action.peers)]
            self._actuator.activate(model, devices, action.kv_limit_bytes, action.joins)
        elif isinstance(action, Evict):
            self._decide("evict", action.model, action.device, "", action.reason)
            resident = self._resident(model, action.device)
            if resident is not None:
                self._actuator.evict(model, resident, action.move_running)
        else:
            self._migrate(model, action)

    def _migrate(self, model: SimModel, action: Migrate) -> None:
        self._decide("migrate", action.model, action.source, action.target, action.reason)
        devices = [self._devices[name] for name in (action.target, *action.peers)]
        source = self._resident(model, action.source)
        if source is not None and source.replaced_by is None:
            self._actuator.migrate(model, source, devices, action.move_running)

    def refuse(self, model: SimModel, action: Refuse) -> None:
        if model.refusal != action.reason:
            model.refusal = action.reason
            self._decide("refuse", action.model, "", "", action.reason)
        if action.overload:
            model.given_up = model.deferred = True
            for request in model.withdraw_unplaced():
                self._records.finish(request, self._kernel.time_s, "unserved")
        if self._evicts:
            # The model is activated once a request arrives, for which others may be evicted, or
            # where memory is to spare.
            model.wanted, model.deferred = False, model.wanted or model.deferred

    def end_refusals(self, actions: Sequence[Action]) -> None:
        """Lets requests wait for models that a plan's `actions` do not give up any more."""
        for model in self._models.values():
            if model.given_up and Refuse(model.setup.name, model.refusal, True) not in actions:
                model.given_up = False

    def _decide(self, kind: str, model: str, device: str, target: str, reason: str) -> None:
        self._records.decide(Decision(self._kernel.time_s, kind, model, device, target, reason))

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
        for index, model in list(self.growing.items()):
            total = model.tokens_total
            for resident in model.residents:
                if (engine := resident.engine) is not None:
                    total += engine.prompt_tokens_total + engine.output_tokens()
            if total != model.tokens_seen:
                grown[model.setup.name] = model.tokens_seen = total
            if not model.busy:
                del self.growing[index]
        self._rates.observe("cluster", 1, grown, now_s)
