"""Actuator of the cluster scheduler: activations, evictions and migrations.

Evictions and the
sources of migrations let running requests finish first, unless the action moves them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prism_sim.cluster.activation import activation_s, home_node, migration_s
from prism_sim.cluster.activation_queue import ActivationQueue
from prism_sim.cluster.copies import SimModel
from prism_sim.cluster.device import Resident, SimDevice, Stage
from prism_sim.cluster.handover import Handover
from prism_sim.cluster.parts import ClusterParts
from prism_sim.cluster.stores import HostStores
from prism_sim.core.records import Decision
from prism_sim.engine.compute import Compute
from prism_sim.engine.engine import SimEngine


@dataclass(frozen=True, slots=True)
class Hooks:
    """Callbacks into the world."""

    # Routes the unplaced requests of a model.
    route: Callable[[SimModel], None]
    # Wakes the cluster scheduler.
    changed: Callable[[], None]
    # Makes the engine of a loaded copy.
    engine: Callable[[SimModel, Resident, Compute], SimEngine]


class SimActuator:
    """Executes the actions of the cluster scheduler. REQUIRES: the policy follows the rules of the
    live system (no action for a model while another one is in progress)."""

    def __init__(self, parts: ClusterParts, hooks: Hooks) -> None:
        kernel, setup, records = parts.kernel, parts.setup, parts.records
        self._kernel = kernel
        self._setup = setup
        self._restarts = parts.policy.restarts_engine
        self._records = records
        self._hooks = hooks
        self._compute = Compute(kernel)
        # Activations that wait for memory.
        self.queue = ActivationQueue(kernel, self._loaded, self._give_up)
        self.instant = setup.warm
        self._pooled = parts.policy.steps is not None
        bounded = setup.activation.host_store_bytes is not None
        self._stores = HostStores(setup, records) if bounded else None
        self._handover = Handover(kernel, setup.activation, records, hooks.route, self._handed_over)

    # --- actions ----------------------------------------------------------------------------

    def activate(
        self,
        model: SimModel,
        devices: list[SimDevice],
        limit_bytes: int | None,
        joins: bool = False,
    ) -> Resident:
        """Starts an activation. The model's waiting requests enter the new copy's queue at once.

        joins: The copy is an additional one and gets a part of the other copies' waiting requests
        once it is active.
        """
        resident = self._begin(model, devices, limit_bytes, self._load_s(model, devices))
        resident.joins = joins
        self._hooks.route(model)
        return resident

    def evict(self, model: SimModel, resident: Resident, move_running: bool = False) -> None:
        """Drains and removes a copy. move_running: running requests continue at another copy after
        their present step."""
        resident.stage = Stage.DRAINING
        self._withdraw(model, resident)
        if move_running:
            self._handover.start(model, resident, None)
        self._remove_if_empty(model, resident)

    def migrate(
        self, model: SimModel, source: Resident, devices: list[SimDevice], move_running: bool
    ) -> None:
        """Starts a migration. The source serves until the target is active.

        move_running: Running requests then continue at the target after their present step, instead
        of finishing at the source.
        """
        ranks = [d.setup for d in devices]
        load_s = self._load_s(model, devices)
        held = [d.setup for d in source.devices]
        from_host = self._stores is not None and held[0].node != ranks[0].node
        if not from_host:
            load_s = migration_s(model.setup, held, ranks, self._setup.activation, load_s)
        target = self._begin(model, devices, source.kv_limit_bytes, load_s, from_host=from_host)
        target.replaces, source.replaced_by = source, target
        target.takes_running = move_running

    def request_ended(self, model: SimModel, resident: Resident) -> None:
        """Removes a draining copy if it is empty. Called when a request of the copy ends."""
        if resident.stage is Stage.DRAINING:
            self._kernel.after(0.0, self._remove_if_empty, model, resident)

    # --- activation -------------------------------------------------------------------------

    def _begin(
        self,
        model: SimModel,
        devices: list[SimDevice],
        limit_bytes: int | None,
        load_s: float,
        from_host: bool = True,
    ) -> Resident:
        now_s = self._kernel.time_s
        load_s = 0.0 if self.instant else load_s
        leaving = [
            r for r in devices[0].guests if r.stage is Stage.DRAINING and r.replaced_by is None
        ]
        resident = Resident(model.setup, devices, now_s, now_s + load_s, limit_bytes, self._pooled)
        resident.waits_for = leaving
        if self._stores is not None and from_host:
            # The transfer starts now, while other copies are still being removed, as by a hint in
            # the live system. Measured times include it.
            at_once = self.instant or model.setup.measured_s(now_s) is not None
            node = devices[0].setup.node
            resident.weights_s = self._stores.fetch(model.setup, node, now_s, at_once=at_once)
        model.residents.append(resident)
        devices[0].residents[model.setup.name] = resident
        for device in devices:
            device.host(resident)
        self.queue.add(model, resident, self._setup.activation_timeout_s)
        return resident

    def _loaded(self, model: SimModel, resident: Resident) -> None:
        resident.engine = self._hooks.engine(model, resident, self._compute)
        for device in resident.devices:
            device.site.spaces.append(resident.engine.kv)
        resident.stage = Stage.ACTIVE
        resident.last_use_s = self._kernel.time_s
        model.wanted = model.deferred = model.given_up = False
        model.refusal = ""
        self._log("active", resident)
        if resident.replaces is not None:
            self._take_over(model, resident)
        if resident.joins:
            model.unplace_waiting()
        self._hooks.route(model)
        resident.home.try_dispatch()
        self._hooks.changed()

    def _take_over(self, model: SimModel, target: Resident) -> None:
        source, target.replaces = target.replaces, None
        assert source is not None
        target.last_use_s = source.last_use_s
        self._log("migrated", target)
        self.evict(model, source)
        if target.takes_running:
            self._handover.start(model, source, target)

    def _handed_over(self, model: SimModel, source: Resident) -> None:
        """Uses the memory that the moved requests left."""
        self.queue.retry()
        for device in source.devices:
            device.try_dispatch()
        self._remove_if_empty(model, source)

    def _give_up(self, model: SimModel, resident: Resident) -> None:
        """Removes a copy that got no memory in time."""
        model.barred[resident.home.name] = self._kernel.time_s + self._setup.bar_s
        if resident.replaces is not None:
            resident.replaces.replaced_by = None
        self._remove(model, resident, "failed")

    # --- removal ----------------------------------------------------------------------------

    def _remove_if_empty(self, model: SimModel, resident: Resident) -> None:
        if resident not in model.residents or resident.running:
            return
        if resident.stage is not Stage.DRAINING or resident.ready_s > self._kernel.time_s:
            return
        if not self._has_unloaded(model, resident):
            return
        space = resident.engine.kv if resident.engine is not None else None
        for device, account in zip(resident.devices, resident.accounts, strict=True):
            device.ledger.close(account.name)
            if space is not None:
                device.site.spaces.remove(space)
        self._remove(model, resident, "evicted")
        for device in resident.devices:
            device.try_dispatch()

    def _has_unloaded(self, model: SimModel, resident: Resident) -> bool:
        """Returns whether an empty copy is unloaded. The first call starts to unload it and
        schedules another check."""
        now_s, unload_s = self._kernel.time_s, self._setup.activation.unload_s
        if resident.unloaded_s is None:
            resident.unloaded_s = now_s + unload_s
            if unload_s > 0:
                self._kernel.after(unload_s, self._remove_if_empty, model, resident)
        return resident.unloaded_s <= now_s

    def _remove(self, model: SimModel, resident: Resident, kind: str) -> None:
        model.residents.remove(resident)
        if resident.home.residents.get(model.setup.name) is resident:
            del resident.home.residents[model.setup.name]
        for device in resident.devices:
            device.unhost(resident)
        self._log(kind, resident)
        if resident.engine is not None:
            model.tokens_total += resident.engine.prompt_tokens_total
            model.tokens_total += resident.engine.output_tokens_total
        resident.stage = Stage.DRAINING
        self._withdraw(model, resident)
        self.queue.retry()
        self._hooks.changed()

    def _withdraw(self, model: SimModel, resident: Resident) -> None:
        """Routes the copy's waiting requests to another copy; without one they wait."""
        for request in resident.home.withdraw(resident):
            model.unplaced[request.index] = request
        self._hooks.route(model)

    def _load_s(self, model: SimModel, devices: list[SimDevice]) -> float:
        measured_s = model.setup.measured_s(self._kernel.time_s)
        if measured_s is not None:
            return measured_s
        return activation_s(
            model.setup,
            [d.setup for d in devices],
            self._setup.activation,
            restarts=self._restarts,
            weights_node=home_node(model.setup, self._setup),
        )

    def _log(self, kind: str, resident: Resident) -> None:
        name, home = resident.model.name, resident.home.name
        self._records.decide(Decision(self._kernel.time_s, kind, name, home))
