"""Models coming up, going and moving: the actuator behind `ClusterPort.apply`.

An activation reserves weights and KV floor on all its devices before anything is loaded; while
they lack memory it waits for what runs there to end, and admission leaves it the free memory.
Evictions let their running requests end first, and so do the sources of migrations, unless the
requests are to move: then they go on at the target, or at another copy, with their KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from prism.policies.kv_network import sends_kv
from prism.policies.policy import Policy
from prism_sim.cluster.activation import activation_s, handover_s, home_node, migration_s
from prism_sim.cluster.copies import SimModel
from prism_sim.cluster.device import SimDevice
from prism_sim.cluster.resident import Resident, Stage
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
    """What the world does when a copy changes."""

    # Requests of the model may go elsewhere now.
    route: Callable[[SimModel], None]
    # The cluster scheduler should look.
    changed: Callable[[], None]
    # Makes the engine of a copy that is up.
    engine: Callable[[SimModel, Resident, Compute], SimEngine]


class SimActuator:
    """REQUIRES of all orders: the policy keeps the rules of the live system (a model with an
    action under way gets no other)."""

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

    # --- orders -----------------------------------------------------------------------------

    def activate(
        self,
        model: SimModel,
        devices: list[SimDevice],
        limit_bytes: int | None,
        joins: bool = False,
    ) -> Resident:
        """Bring `model` up; its waiting requests go to the new copy's queue at once. joins: a part
        of those of the other copies, when it is up."""
        resident = self._begin(model, devices, limit_bytes, self._load_s(model, devices))
        resident.joins = joins
        self._hooks.route(model)
        return resident

    def evict(self, model: SimModel, resident: Resident, move_running: bool = False) -> None:
        """The copy takes no more requests, ends those that run and is gone. move_running: those go
        on at another copy after their present step."""
        resident.stage = Stage.DRAINING
        self._withdraw(model, resident)
        if move_running:
            self._send_on(model, resident, None)
        self._leave_if_empty(model, resident)

    def migrate(
        self, model: SimModel, source: Resident, devices: list[SimDevice], move_running: bool
    ) -> None:
        """Make before break: the source serves until the target is ready. move_running: then what
        runs there goes on at the target after its present step, instead of finishing."""
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
        """A draining copy may be empty now. Call when a request of it ends."""
        if resident.stage is Stage.DRAINING:
            self._kernel.after(0.0, self._leave_if_empty, model, resident)

    def memory_freed(self) -> None:
        """Activations that wait for memory try again, oldest first."""
        for model, resident in list(self._queued):
            self._try_load(model, resident)

    @property
    def waits_for_memory(self) -> bool:
        return bool(self._queued)

    # --- coming up --------------------------------------------------------------------------

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
        resident.after = leaving
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
            self._kernel.after(timeout_s, self._give_up, model, resident)
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
            self._send_on(model, source, target)

    def _send_on(self, model: SimModel, source: Resident, target: Resident | None) -> None:
        """What runs at the source goes on at the target, or is divided among the other copies."""
        if source.engine is not None and source.running:
            source.engine.stop(partial(self._copy_kv, model, source, target))

    def _copy_kv(self, model: SimModel, source: Resident, target: Resident | None) -> None:
        """Requests stand still while their KV is on its way: over the source's link, for as long
        as if all went to one copy. To another node it goes to one copy, or is left behind."""
        assert source.engine is not None
        receiver = target or _nearest(model, source)
        if receiver is None:
            self._hand_over(model, source, None, "")
            return
        node, near = _node(receiver), _node(receiver) == _node(source)
        if not near and not self._is_sent(source):
            self._hand_over(model, source, target, "")
            return
        here, there = ([d.setup for d in r.devices] for r in (source, receiver))
        copy_s = handover_s(source.engine.kv.used_bytes, here, there, self._setup.activation)
        goes_to = target if near else receiver
        self._kernel.after(copy_s, self._hand_over, model, source, goes_to, node)

    def _is_sent(self, source: Resident) -> bool:
        """To another node, as the live agent of the source decides. Several ranks have no file that
        could be sent."""
        speed, network = source.home.speed_tokens_per_s(source.model), self._setup.activation
        sent = sends_kv(source.model.token_bytes, speed, network.network_bytes_s)
        return source.tp == 1 and sent

    def _hand_over(
        self, model: SimModel, source: Resident, target: Resident | None, kv_node: str
    ) -> None:
        """To the target, or to the other copies if that is gone again, with the KV that is on their
        node; without any they wait for one, and are computed again."""
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
        self._leave_if_empty(model, source)

    def _give_up(self, model: SimModel, resident: Resident) -> None:
        """It found no memory in time."""
        if resident.stage is not Stage.QUEUED:
            return
        self._queued.remove((model, resident))
        for device in resident.devices:
            device.pending_bytes -= resident.need_bytes(device)
        model.barred[resident.home.name] = self._kernel.time_s + self._setup.bar_s
        if resident.replaces is not None:
            resident.replaces.replaced_by = None
        self._remove(model, resident, "failed")

    # --- going ------------------------------------------------------------------------------

    def _leave_if_empty(self, model: SimModel, resident: Resident) -> None:
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
        """An empty copy begins to unload, and is looked at again when that is over."""
        now_s, unload_s = self._kernel.time_s, self._setup.activation.unload_s
        if resident.leaves_s is None:
            resident.leaves_s = now_s + unload_s
            if unload_s > 0:
                self._kernel.after(unload_s, self._leave_if_empty, model, resident)
        return resident.leaves_s <= now_s

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
        """Its waiting requests go to another copy, or wait for one."""
        for request in resident.home.withdraw(resident):
            model.unplaced[request.index] = request
        self._hooks.route(model)

    def _spread(self, model: SimModel) -> None:
        """What waits is divided among all copies that take requests, in the order of arrival."""
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
        """They begin to come with the order, as a live hint has it, while others still leave. Times
        of activations that were measured have it in them."""
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
    """Of its other copies the first one on the source's node, or else the first one."""
    return min(_active(model), key=lambda r: _node(r) != _node(source), default=None)


def _divided(
    requests: Sequence[SimRequest], copies: Sequence[Resident]
) -> list[tuple[Resident, list[SimRequest]]]:
    """Each request for the copy with the fewest by then, as the queues of the live system do."""
    asked = [copy.open_requests for copy in copies]
    shares: list[list[SimRequest]] = [[] for _ in copies]
    for request in requests:
        least = asked.index(min(asked))
        asked[least] += 1
        shares[least].append(request)
    return [(copy, share) for copy, share in zip(copies, shares, strict=True) if share]


def _has_room(resident: Resident) -> bool:
    """By the ledgers as they stand; runs in flight may hold more than those show. Nothing comes up
    before those are gone that were leaving when it was ordered."""
    if any(each in each.home.guests for each in resident.after):
        return False
    return all(
        d.ledger.free_bytes + idle_bytes(d.site) >= resident.need_bytes(d) for d in resident.devices
    )
