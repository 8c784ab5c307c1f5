"""Virtual queues of the simulated cluster (`prism/scheduler/virtual_queues.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from prism.policies.placement import Placement, Unit
from prism.policies.queues import Assign, QueueDevice, QueuedRequest, QueueView, VirtualQueue
from prism.scheduler.virtual_queues import VirtualQueues, tokens_per_s
from prism_sim.cluster.activation import activation_s, home_node
from prism_sim.cluster.copies import SimModel
from prism_sim.cluster.device import Resident, Stage
from prism_sim.cluster.parts import ClusterParts
from prism_sim.core.profile import ModelLoad
from prism_sim.core.request import SimRequest
from prism_sim.core.setup import ModelSetup


class Bindings:
    """Virtual queues of one cluster. Requests stay in `SimModel.unplaced` until they start."""

    def __init__(
        self,
        assign: Assign,
        parts: ClusterParts,
        loads: Sequence[ModelLoad],
    ) -> None:
        self._queues = VirtualQueues(assign)
        self._setup = parts.setup
        self._loads = loads
        self._models = {model.setup.name: model for model in parts.models}
        self._devices = {device.name: device for device in parts.devices}
        self._instances: tuple[Unit, ...] = ()
        self._tokens_per_s: dict[str, float] = {}
        self._swap_s: dict[str, float] = {}
        self._shown: dict[int, QueuedRequest] = {}

    def begin(self, target: Placement) -> None:
        """Sets the units of `target` as the serving instances. REQUIRES: called first."""
        self._instances = target.units
        for unit in target.units:
            for hosted in unit.models:
                model = self._models[hosted.model].setup
                self._tokens_per_s[model.name] = self._speed(model, unit.tp)
                self._swap_s[model.name] = self._startup_s(model, unit)

    def assign(self, now_s: float) -> tuple[VirtualQueue, ...]:
        """Returns queues with all waiting requests, or the previous queues if they are recent."""
        if now_s >= self._queues.due_s:
            self._queues.update(self._view(now_s))
        return self._queues.queues

    def starting(self) -> list[tuple[Resident, SimRequest]]:
        """Returns the requests of the leading groups whose model is active, with their copies, and
        removes them from `SimModel.unplaced`."""
        found: list[tuple[Resident, SimRequest]] = []
        for device, group in self._queues.starting(self._is_active):
            resident = self._devices[device].residents[group.model]
            waiting = self._models[group.model].unplaced
            ids = [int(key) for key in group.requests]
            found += [(resident, waiting.pop(index)) for index in ids if index in waiting]
        for _, request in found:
            self._shown.pop(request.index, None)
        return found

    def _is_active(self, device: str, model: str) -> bool:
        resident = self._devices[device].residents.get(model)
        return resident is not None and resident.stage is Stage.ACTIVE

    def _view(self, now_s: float) -> QueueView:
        shown = self._shown
        waiting = tuple(
            shown.get(index) or self._queued(model, request)
            for model in self._models.values()
            for index, request in model.unplaced.items()
            if model.setup.name in self._tokens_per_s
        )
        devices = tuple(self._instance(unit) for unit in self._instances)
        queues = self._queues.queues
        return QueueView(now_s, waiting, devices, queues, self._tokens_per_s, self._swap_s)

    def _queued(self, model: SimModel, request: SimRequest) -> QueuedRequest:
        """Returns the view of a request, cached until it starts since it does not change."""
        found = self._shown[request.index] = QueuedRequest(
            str(request.index),
            model.setup.name,
            request.arrival_s,
            request.deadline_s,
            request.prompt_tokens,
            self._loads[model.setup.index].output_tokens,
        )
        return found

    def _instance(self, unit: Unit) -> QueueDevice:
        residents = self._devices[unit.devices[0]].residents.values()
        here = [r for r in residents if r.stage is not Stage.DRAINING]
        return QueueDevice(
            unit.devices[0],
            here[0].model.name if here else None,
            sum(r.open_requests for r in residents),
            frozenset(hosted.model for hosted in unit.models),
        )

    def _speed(self, model: ModelSetup, tp: int) -> float:
        """Returns the output tokens per second at the largest batch whose KV fits."""
        load, cost = self._loads[model.index], model.parts[tp].cost
        tokens = load.prompt_tokens + load.output_tokens
        return tokens_per_s(
            lambda batch: cost.decode_s(batch, round(batch * tokens)),
            self._setup.devices[0].capacity_bytes * tp - model.held_bytes(tp),
            model.token_bytes * model.need.held_tokens(tokens),
            self._setup.engine.max_running,
        )

    def _startup_s(self, model: ModelSetup, unit: Unit) -> float:
        ranks = [self._devices[name].setup for name in unit.devices]
        where, settings = home_node(model, self._setup), self._setup.activation
        return activation_s(model, ranks, settings, restarts=True, weights_node=where)
