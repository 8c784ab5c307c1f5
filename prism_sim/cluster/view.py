"""Views of the simulated cluster for the policies.

Views are rebuilt for each plan and must be cheap: the view of a model without copies and requests
is reused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import structs

from prism.policies.data import (
    NO_TRAFFIC,
    ClusterView,
    Degree,
    DeviceLoad,
    GpuView,
    ModelView,
    Settings,
    Traffic,
    contending,
)
from prism.policies.planning import compute
from prism.policies.planning.model_copies import may_adjust
from prism.scheduler.traffic import SLOT_S, share_of
from prism_sim.cluster.activation import startup_s
from prism_sim.cluster.copies import SimModel
from prism_sim.cluster.device import Resident, SimDevice, Stage
from prism_sim.core.records import DEVICES_SAMPLED, ClusterSample, ModelMemory
from prism_sim.core.setup import ClusterSetup, ModelSetup

CHUNK_TOKENS, CONTEXT_TOKENS, BATCH = 4096, 1024, 64
"""Steps from which the step times of views are computed."""


class Viewer:
    """Builder of the views, with a cache of unchanged ones.

    Args:
        startup: The setup if the policy needs the activation time of models on each device, else
            None.
        expected: Model's name -> the traffic that policies may know beforehand.
    """

    def __init__(
        self,
        models: Sequence[SimModel],
        devices: Sequence[SimDevice],
        startup: ClusterSetup | None,
        expected: Mapping[str, Traffic],
    ) -> None:
        self._startup = startup
        self._expected = expected
        self._models = models
        self._by_name = {model.setup.name: model for model in models}
        self._devices = devices
        self._absent: dict[int, ModelView] = {}
        # (Model, degree) -> its view without copies and requests.
        self._plain: dict[tuple[int, int], ModelView] = {}
        self._slot = -1  # traffic slot of the last `loads`

    def models(self, now_s: float, rates: Mapping[str, float]) -> tuple[ModelView, ...]:
        """Returns a view for each copy, and one for a model without copies, in the order of the
        models. The target of a migration is visible only as fixed memory in `gpus`."""
        views: list[ModelView] = []
        for model in self._models:
            shown = [r for r in model.residents if r.replaces is None]
            rate = rates.get(model.setup.name, 0.0)
            views.extend(self._resident_view(model, r, now_s, rate / len(shown)) for r in shown)
            if not shown:
                views.append(self._absent_view(model, now_s, rate))
        return tuple(views)

    def loads(
        self, now_s: float, rates: Mapping[str, float], settings: Settings
    ) -> Iterator[DeviceLoad]:
        """Yields the loads for `Policy.is_balanced`.

        Only devices with several busy models, with little free memory, or with a model whose number
        of copies may change can affect the result, and late models. free_part treats claims of runs
        in flight as used, unless that brings it below `short_fraction`.
        """
        low_part = settings.short_fraction
        # Traffic changes once in each slot, so late models are not looked for again in between.
        slot = int(now_s / SLOT_S)
        is_new = slot != self._slot
        self._slot = slot
        running: dict[SimDevice, list[float]] = {}
        for name, rate in rates.items():
            model = self._by_name[name]
            shown = [r for r in model.residents if r.replaces is None]
            for resident in shown:
                devices = resident.devices
                part = rate * model.setup.slo_tpot_s / len(shown) / len(devices)
                for device in devices:
                    running.setdefault(device, []).append(part)
        unsettled = self._unsettled(now_s, rates, settings)
        for device in self._devices:
            ledger, parts = device.ledger, running.get(device, ())
            free_part = (ledger.spare_bytes - device.pending_bytes) / ledger.capacity_bytes
            if free_part < low_part:
                device.site.sync()
                free_part = device.room_bytes() / ledger.capacity_bytes
            if len(parts) > 1 or free_part < low_part or device in unsettled:
                yield DeviceLoad(contending(parts), free_part, device in unsettled)
        # Last, since this takes long, and one of the loads before may be enough to plan.
        if is_new and self._is_any_late(now_s):
            yield DeviceLoad(0.0, 1.0, unsettled=True)

    def _unsettled(
        self, now_s: float, rates: Mapping[str, float], settings: Settings
    ) -> set[SimDevice]:
        """Returns the devices of models that may get a copy."""
        found: set[SimDevice] = set()
        for model in self._models:
            residents, setup = model.residents, model.setup
            if not residents or setup.replicas_max == 1:
                continue
            waits = residents[0].waiting or model.unplaced
            if len(residents) == 1 and setup.replicas_min == 1 and not waits:
                continue  # fast path for most models
            shown = [r for r in model.residents if r.replaces is None]
            share = rates.get(model.setup.name, 0.0) / max(1, len(shown))
            for resident in shown:
                view = self._resident_view(model, resident, now_s, share)
                if may_adjust(view, len(shown), settings):
                    found.update(resident.devices)
        return found

    def _is_any_late(self, now_s: float) -> bool:
        """Returns whether a model is late, or its degree may be lowered."""
        views = tuple(
            self._busy_view(model, resident, traffic)
            for model in self._models
            if model.residents and (traffic := model.traffic.seen(now_s)).requests
            for resident in model.residents
            if resident.replaces is None
        )
        return bool(compute.changes(ClusterView(now_s, views, ())))

    def sample(self, now_s: float, holding: Sequence[SimModel]) -> ClusterSample:
        """Returns a sample of the cluster. holding: all models with requests or KV memory."""
        kv_bytes: dict[int, int] = {}
        running = waiting = reserved_bytes = 0
        for device in self._devices:
            if device.gpu.jobs:
                device.site.sync()
            reserved_bytes += device.ledger.reserved_bytes
        for model in holding:
            waiting += len(model.unplaced) + sum([r.waiting for r in model.residents])
            running += sum([r.running for r in model.residents])
            if held_bytes := sum([r.kv_bytes for r in model.residents]):
                kv_bytes[model.setup.index] = held_bytes
        devices = {
            device.name: tuple(
                [_memory(guest, device) for guest in device.guests if guest.accounts]
            )
            for device in self._devices[:DEVICES_SAMPLED]
        }
        return ClusterSample(now_s, kv_bytes, reserved_bytes, waiting, running, devices)

    def gpus(self) -> tuple[GpuView, ...]:
        for device in self._devices:
            if device.gpu.jobs:
                device.site.sync()
        return tuple(_gpu(device) for device in self._devices)

    def _absent_view(self, model: SimModel, now_s: float, rate: float) -> ModelView:
        setup, waiting = model.setup, len(model.unplaced)
        barred = tuple(name for name, until_s in model.barred.items() if until_s > now_s)
        known = self._absent.get(setup.index)
        traffic = model.traffic.seen(now_s)
        state = (rate, waiting, model.wanted, model.deferred, barred, traffic)
        if known is not None and state == (
            *(known.token_rate, known.waiting, known.wanted, known.deferred),
            *(known.barred, known.traffic),
        ):
            return known
        view = self._absent[setup.index] = structs.replace(
            self._plain_view(setup, setup.tp),
            token_rate=rate,
            waiting=waiting,
            wanted=model.wanted,
            deferred=model.deferred,
            barred=barred,
            traffic=traffic,
        )
        return view

    def _resident_view(
        self, model: SimModel, resident: Resident, now_s: float, rate: float
    ) -> ModelView:
        devices = resident.devices
        waiting, running = resident.waiting + len(model.unplaced), resident.running
        idle_s = 0.0 if waiting or running else now_s - max(resident.last_use_s, resident.since_s)
        target = resident.replaced_by if resident.stage is Stage.ACTIVE else None
        copies = sum(r.replaces is None for r in model.residents)
        return structs.replace(
            self._plain_view(model.setup, len(devices)),
            token_rate=rate,
            waiting=waiting,
            running=running,
            idle_s=idle_s,
            owes_s=resident.repaid_s - now_s if resident.repaid_s > now_s else 0.0,
            device=resident.home.name,
            state=resident.state,
            peers=tuple(d.name for d in devices[1:]) if len(devices) > 1 else (),
            oldest_wait_s=now_s - resident.first_s if resident.queue else 0.0,
            load_s=resident.load_s,
            moving_to=tuple(d.name for d in target.devices) if target is not None else (),
            traffic=share_of(model.traffic.seen(now_s), copies),
        )

    def _busy_view(self, model: SimModel, resident: Resident, traffic: Traffic) -> ModelView:
        """Returns a view that has what `compute.changes` reads of a model."""
        home, *peers = resident.devices
        return structs.replace(
            self._plain_view(model.setup, 1 + len(peers)),
            device=home.name,
            peers=tuple([d.name for d in peers]),
            state=resident.state,
            traffic=share_of(traffic, sum([r.replaces is None for r in model.residents])),
        )

    def _plain_view(self, setup: ModelSetup, tp: int) -> ModelView:
        found = self._plain.get((setup.index, tp))
        if found is None:
            found = self._plain[setup.index, tp] = ModelView(
                setup.name,
                setup.held_bytes(tp),
                setup.token_bytes,
                setup.kv_floor_bytes,
                setup.slo_ttft_s,
                setup.slo_tpot_s,
                never_evict=setup.never_evict,
                pinned_device=setup.pinned_device,
                static_share=setup.static_share,
                replicas_min=setup.replicas_min,
                replicas_max=setup.replicas_max,
                tp=tp,
                startup_s=startup_s(setup, self._startup) if self._startup else {},
                share_bytes=setup.share_bytes,
                degrees=degrees_of(setup),
                expected=self._expected.get(setup.name, NO_TRAFFIC),
            )
        return found


def degrees_of(setup: ModelSetup) -> dict[int, Degree]:
    """Returns the degrees that a policy may choose, with step times for `CONTEXT_TOKENS`."""
    return {tp: _degree(setup, tp) for tp in setup.degrees or (setup.tp,)}


def _degree(setup: ModelSetup, tp: int) -> Degree:
    cost = setup.parts[tp].cost
    one_s = cost.decode_s(1, CONTEXT_TOKENS)
    request_s = (cost.decode_s(BATCH, BATCH * CONTEXT_TOKENS) - one_s) / (BATCH - 1)
    return Degree(
        setup.held_bytes(tp),
        setup.token_bytes,
        setup.kv_floor_bytes,
        prefill_tokens_per_s=CHUNK_TOKENS / cost.prefill_s(CHUNK_TOKENS),
        step_s=one_s - request_s,
        request_s=request_s,
    )


def _memory(resident: Resident, device: SimDevice) -> ModelMemory:
    account = resident.accounts[resident.devices.index(device)]
    return ModelMemory(resident.model.index, account.static_bytes, account.kv_bytes)


def _gpu(device: SimDevice) -> GpuView:
    """Returns the view of a GPU. fixed_bytes is the memory of migration targets, since a migrating
    model's view names its source device."""
    fixed_bytes = 0
    for resident in device.guests:
        if resident.replaces is not None and resident.stage is not Stage.DRAINING:
            fixed_bytes += resident.need_bytes(device)
    setup_ = device.setup
    return GpuView(
        setup_.name,
        setup_.capacity_bytes,
        fixed_bytes,
        max(0, device.room_bytes()),
        setup_.engines - len(device.guests),
        setup_.engines,
        node=setup_.node,
    )
