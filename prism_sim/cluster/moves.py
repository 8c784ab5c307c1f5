"""Actuator of the cluster scheduler: activations, evictions and migrations.

An activation reserves weights and KV floor on all its devices before it loads. If they lack memory,
it waits until running requests end, and admission does not use the freed memory. Evictions and the
sources of migrations let running requests finish first. If the action moves requests instead, they
continue at the target, or at another copy, with their KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from prism.policies.kv_network import sends_kv
from prism.policies.policy import Policy
from prism_sim.cluster.activation import activation_s, handover_s, home_node, migration_s
from prism_sim.cluster.copies import SimModel
from prism_sim.cluster.device import Resident, SimDevice, Stage
from prism_sim.cluster.stores import HostStores
from prism_sim.core.kernel import Kernel
from prism_sim.core.records import Decision, Records
from prism_sim.core.request import SimRequest
from prism_sim.core.setup import ClusterSetup, ModelSetup
from prism_sim.core.workload import NO_SLO
from prism_sim.engine.compute import Compute
from prism_sim.engine.engine import SimEngine
from prism_sim.engine.kv import drop_until_free, idle_bytes
from prism_sim.engine.memory import Account


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

    def __init__(
        self,
        kernel: Kernel,
        setup: ClusterSetup,
        policy: Policy,
        records: Records,
        hooks: Hooks,
    ) -> None:
        self._kernel = kernel
        self._setup = setup
        self._policy = policy
        self._records = records
        self._hooks = hooks
        self._compute = Compute(kernel)
        self._queued: list[tuple[SimModel, Resident]] = []
        self._serial = 0
        self.instant = setup.warm
        self._pooled = policy.steps is not None
        bounded = setup.activation.host_store_bytes is not None
        self._stores = HostStores(setup, records) if bounded else None

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
            self._move_running(model, resident, None)
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

    def memory_freed(self) -> None:
        """Retries activations that wait for memory, oldest first."""
        for model, resident in list(self._queued):
            self._try_load(model, resident)

    @property
    def waits_for_memory(self) -> bool:
        return bool(self._queued)

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
            resident.weights_s = self._weights_s(self._stores, model.setup, devices[0].setup.node)
        model.residents.append(resident)
        devices[0].residents[model.setup.name] = resident
        for device in devices:
            device.host(resident)
            device.pending_bytes += resident.need_bytes(device)
        self._queued.append((model, resident))
        timeout_s = self._setup.activation_timeout_s
        self._try_load(model, resident)
        if resident.stage is Stage.QUEUED:
            self._kernel.after(timeout_s, self._time_out, model, resident)
        return resident

    def _try_load(self, model: SimModel, resident: Resident) -> None:
        devices = resident.devices
        if not _has_room(resident):
            return
        for device in devices:
            device.site.sync()
        if not _has_room(resident):
            return
        self._queued.remove((model, resident))
        now_s = self._kernel.time_s
        for device in devices:
            drop_until_free(device.site, resident.need_bytes(device))
        load_s = resident.ready_s - resident.since_s + max(0.0, resident.weights_s - now_s)
        resident.load_s = load_s
        resident.stage, resident.ready_s = Stage.LOADING, now_s + load_s
        resident.repaid_s = resident.ready_s + load_s
        for device in devices:
            device.pending_bytes -= resident.need_bytes(device)
            resident.accounts.append(self._open(device, resident))
            if device.ledger.claimed_bytes > device.ledger.free_bytes:
                device.site.end_runs()
        self._kernel.after(load_s, self._loaded, model, resident)

    def _open(self, device: SimDevice, resident: Resident) -> Account:
        self._serial += 1
        setup = resident.model
        static_bytes = device.ledger.aligned(setup.static_bytes(resident.tp))
        name = f"{setup.name}#{self._serial}"
        account = Account(name, static_bytes, 0, resident.floor_bytes, resident.kv_limit_bytes)
        device.ledger.open(account)
        return account

    def _loaded(self, model: SimModel, resident: Resident) -> None:
        resident.engine = self._hooks.engine(model, resident, self._compute)
        for device in resident.devices:
            device.site.spaces.append(resident.engine.kv)
        resident.stage = Stage.ACTIVE
        resident.last_use_s = self._kernel.time_s
        model.wanted, model.refusal = False, ""
        self._log("active", resident)
        if resident.replaces is not None:
            self._take_over(model, resident)
        if resident.joins:
            self._spread(model)
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
            self._move_running(model, source, target)

    def _move_running(self, model: SimModel, source: Resident, target: Resident | None) -> None:
        """Moves the running requests of the source to the target, or divides them among the other
        copies."""
        if source.engine is not None and source.running:
            source.engine.stop(partial(self._copy_kv, model, source, target))

    def _copy_kv(self, model: SimModel, source: Resident, target: Resident | None) -> None:
        """Copies the KV of the source's requests, which pause meanwhile, over the source's link.

        The copy takes as long as if all requests went to one copy. KV for another node is sent to
        one copy, or dropped.
        """
        assert source.engine is not None
        receiver = target or _nearest(model, source)
        if receiver is None:
            self._hand_over(model, source, None, "")
            return
        node, same_node = _node(receiver), _node(receiver) == _node(source)
        if not same_node and not self._is_sent(source):
            self._hand_over(model, source, target, "")
            return
        here, there = ([d.setup for d in r.devices] for r in (source, receiver))
        copy_s = handover_s(source.engine.kv.used_bytes, here, there, self._setup.activation)
        new_home = target if same_node else receiver
        self._kernel.after(copy_s, self._hand_over, model, source, new_home, node)

    def _is_sent(self, source: Resident) -> bool:
        """Returns whether the source's KV is sent to another node, by the rule of the live agent.
        The KV of several ranks cannot be sent."""
        speed, network = source.home.speed_tokens_per_s(source.model), self._setup.activation
        sent = sends_kv(source.model.token_bytes, speed, network.network_bytes_s)
        return source.tp == 1 and sent

    def _hand_over(
        self, model: SimModel, source: Resident, target: Resident | None, kv_node: str
    ) -> None:
        """Moves the source's requests to the target, or to the other active copies if the target is
        not active any more.

        Requests for a copy on `kv_node` keep their KV, the others are recomputed. Without an active
        copy they wait for one.
        """
        assert source.engine is not None
        requests = source.engine.release()
        self._records.count("moved", len(requests))
        active = _active(model)
        receivers = [r for r in active if r is target] or active
        if not receivers:
            for request in requests:
                request.forget_kv()
                slo_s = self._records.work.slo_tpot_s[request.index]
                slo_s = model.setup.slo_tpot_s if slo_s == NO_SLO else slo_s
                request.requeue(self._kernel.time_s, slo_s)
                model.unplaced[request.index] = request
            self._hooks.route(model)
        else:
            for receiver, share in _divided(requests, receivers):
                for request in () if _node(receiver) == kv_node else share:
                    request.forget_kv()
                receiver.home.receive(receiver, share)
        self.memory_freed()
        for device in source.devices:
            device.try_dispatch()
        self._remove_if_empty(model, source)

    def _time_out(self, model: SimModel, resident: Resident) -> None:
        """Fails an activation that still waits for memory."""
        if resident.stage is not Stage.QUEUED:
            return
        self._queued.remove((model, resident))
        for device in resident.devices:
            device.pending_bytes -= resident.need_bytes(device)
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
        self.memory_freed()
        self._hooks.changed()

    def _withdraw(self, model: SimModel, resident: Resident) -> None:
        """Routes the copy's waiting requests to another copy; without one they wait."""
        for request in resident.home.withdraw(resident):
            model.unplaced[request.index] = request
        self._hooks.route(model)

    def _spread(self, model: SimModel) -> None:
        """Makes the waiting requests of all copies unplaced, in the order of arrival, so that they
        are divided anew."""
        waiting = [
            request
            for resident in model.residents
            if resident.takes_requests
            for request in resident.home.withdraw(resident)
        ]
        for request in sorted(waiting, key=lambda request: request.index):
            model.unplaced[request.index] = request

    def _load_s(self, model: SimModel, devices: list[SimDevice]) -> float:
        if model.setup.first_activation_s is not None and self._kernel.time_s == 0.0:
            return model.setup.first_activation_s
        return activation_s(
            model.setup,
            [d.setup for d in devices],
            self._setup.activation,
            restarts=self._policy.restarts_engine,
            weights_node=home_node(model.setup, self._setup),
        )

    def _weights_s(self, stores: HostStores, model: ModelSetup, node: str) -> float:
        """Returns the time at which the node's host memory has the weights.

        The transfer starts with the action, while other copies are still being removed, as by a
        hint in the live system. Measured activation times include the transfer.
        """
        now_s = self._kernel.time_s
        first = model.first_activation_s is not None and now_s == 0.0
        if self.instant or first or model.activation_s is not None:
            stores.keep(model, node, now_s, now_s)
            return now_s
        return stores.fetch(model, node, now_s)

    def _log(self, kind: str, resident: Resident) -> None:
        name, home = resident.model.name, resident.home.name
        self._records.decide(Decision(self._kernel.time_s, kind, name, home))


def _active(model: SimModel) -> list[Resident]:
    return [r for r in model.residents if r.engine and r.stage is Stage.ACTIVE]


def _node(resident: Resident) -> str:
    return resident.home.setup.node


def _nearest(model: SimModel, source: Resident) -> Resident | None:
    """Returns the first active copy on the source's node, or else the first active copy."""
    return min(_active(model), key=lambda r: _node(r) != _node(source), default=None)


def _divided(
    requests: Sequence[SimRequest], copies: Sequence[Resident]
) -> list[tuple[Resident, list[SimRequest]]]:
    """Assigns each request to the copy with the fewest requests, as the live queues do."""
    counts = [copy.open_requests for copy in copies]
    shares: list[list[SimRequest]] = [[] for _ in copies]
    for request in requests:
        least = counts.index(min(counts))
        counts[least] += 1
        shares[least].append(request)
    return [(copy, share) for copy, share in zip(copies, shares, strict=True) if share]


def _has_room(resident: Resident) -> bool:
    """Returns whether an activation fits by the present state of the ledgers, which may lack the
    latest steps of runs in flight. False until the copies that it waits for are removed."""
    if any(each in each.home.guests for each in resident.waits_for):
        return False
    return all(
        d.ledger.free_bytes + idle_bytes(d.site) >= resident.need_bytes(d) for d in resident.devices
    )
