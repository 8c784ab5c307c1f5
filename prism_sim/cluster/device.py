"""Simulated device: its copies of models, its queue and its local scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from prism.models.prefill_speed import Speed
from prism.policies.data import EngineView, Waiting
from prism.policies.policy import Policy
from prism.scheduler.decision_journal import QueueJournal, Sink
from prism.scheduler.local_scheduler import Limits, LocalScheduler
from prism.scheduler.step_loop import StepLoop
from prism_sim.core.kernel import Kernel
from prism_sim.core.request import SimRequest
from prism_sim.core.setup import DeviceSetup, ModelSetup
from prism_sim.engine.compute import Gpu
from prism_sim.engine.controlled import ControlledDevice, ControlledEngine
from prism_sim.engine.engine import SimEngine
from prism_sim.engine.kv import MemorySite, idle_bytes, returnable_bytes
from prism_sim.engine.memory import Account, Ledger

# Expected rest of an activation that takes longer than expected, as in the live agent.
READY_SOON_S = 0.05


class Stage(Enum):
    """State of a copy."""

    # Waits for memory on its devices.
    QUEUED = "queued"
    # Loads its weights.
    LOADING = "loading"
    ACTIVE = "active"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class Resident:
    """One copy of a model, from its activation to its removal.

    Its requests wait in the queue of `home`, the device of rank 0.
    """

    model: ModelSetup
    # Rank 0 first.
    devices: Sequence[SimDevice]
    since_s: float
    # Expected time at which it becomes active.
    ready_s: float
    kv_limit_bytes: int | None = None
    # True if its KV is in a pool shared by the models of its devices.
    pooled: bool = False
    stage: Stage = Stage.QUEUED
    engine: SimEngine | None = None
    # Source of the migration whose target this copy is.
    replaces: Resident | None = None
    # Target of the migration whose source this copy is.
    replaced_by: Resident | None = None
    accounts: list[Account] = field(default_factory=list)
    # Waiting requests by key in the queue of `home`, in the order of enqueueing.
    queue: dict[str, SimRequest] = field(default_factory=dict)
    last_use_s: float = field(default=float("-inf"))
    # Time at which it has been active for as long as it took to load.
    repaid_s: float = field(default=float("-inf"))
    # Duration of its load.
    load_s: float = 0.0
    # Time at which its weights are in the node's host memory.
    weights_s: float = 0.0
    # True if other copies serve the model until this one is active.
    joins: bool = False
    # Time at which its memory is free; None until it is empty.
    unloaded_s: float | None = None
    # Copies that must be removed before this one loads, as in the live actuator.
    waits_for: list[Resident] = field(default_factory=list)
    # True if the running requests of the replaced copy move here.
    takes_running: bool = False
    home: SimDevice = field(init=False)

    def __post_init__(self) -> None:
        self.home = self.devices[0]

    @property
    def tp(self) -> int:
        return len(self.devices)

    def need_bytes(self, device: SimDevice) -> int:
        """Returns the memory that the activation needs on `device`: weights, engine, KV floor."""
        static_bytes = device.ledger.aligned(self.model.static_bytes(self.tp))
        return static_bytes + self.floor_bytes

    @property
    def floor_bytes(self) -> int:
        """KV reserved for the copy on each device; 0 if models share a pool of blocks."""
        return 0 if self.pooled else self.model.floor_bytes(self.tp)

    @property
    def waiting(self) -> int:
        return len(self.queue)

    @property
    def first_s(self) -> float:
        """Time at which the oldest waiting request entered the queue. That request need not be the
        first in `queue` after requests were divided anew among copies. REQUIRES: one waits."""
        return min([request.queued_s for request in self.queue.values()])

    def grew_to(self, waiting: float) -> bool:
        """Returns whether the newest request brought the queue to `waiting` requests. False if the
        model can have only one copy."""
        if not self.queue or self.model.replicas_max == 1:
            return False
        queued = len(self.queue)
        return queued - 1 < max(1.0, waiting) <= queued

    @property
    def saturated_s(self) -> float:
        """Time at which the queue has lasted long enough for another copy. REQUIRES: a request
        waits."""
        return self.first_s + max(self.load_s, self.model.slo_ttft_s)

    @property
    def running(self) -> int:
        return self.engine.running if self.engine is not None else 0

    @property
    def kv_bytes(self) -> int:
        """KV memory on all its devices together."""
        return self.engine.kv.kv_bytes * len(self.devices) if self.engine is not None else 0

    @property
    def open_requests(self) -> int:
        return self.waiting + self.running

    @property
    def takes_requests(self) -> bool:
        """True if new requests may be sent to the copy. The target of a migration and an additional
        copy take requests only once they are active."""
        if self.replaces is not None or (self.joins and self.stage is not Stage.ACTIVE):
            return False
        return self.stage is not Stage.DRAINING

    @property
    def state(self) -> str:
        """State as in `ModelView.state`."""
        if self.stage is Stage.DRAINING:
            return "draining"
        if self.replaced_by is not None:
            return "migrating"
        return "active" if self.stage is Stage.ACTIVE else "activating"


class SimDevice:
    """Executes the local scheduler's plans on one simulated device.

    Args:
        number: Index of the device in the cluster, as in `Records`.
        gpu: Processor shared with other devices. Default: a separate one.
        journal: Receives the records of the device's queue.
    """

    def __init__(
        self,
        kernel: Kernel,
        number: int,
        setup: DeviceSetup,
        policy: Policy,
        limits: Limits,
        *,
        gpu: Gpu | None = None,
        journal: Sink | None = None,
    ) -> None:
        self._kernel = kernel
        self.number = number
        self.setup = setup
        self.name = setup.name
        self.gpu = gpu or Gpu(setup.name)
        self.ledger = Ledger(setup.capacity_bytes, setup.page_bytes)
        self.site = MemorySite(setup.name, self.ledger)
        # Model -> its copy with rank 0 on this device.
        self.residents: dict[str, Resident] = {}
        # Copies with any rank on this device.
        self.guests: list[Resident] = []
        # Model -> measured speed of its prefills on this device, kept when a copy is removed.
        self.speeds: dict[str, Speed] = {}
        self._homes: tuple[SimDevice, ...] | None = None
        # Memory that queued activations need. Admission does not use it, so that running models do
        # not starve an activation.
        self.pending_bytes = 0
        observer = None if journal is None else QueueJournal(journal, kernel.now_s)
        self._observer = observer
        self.scheduler = LocalScheduler(limits, policy.order, observer)
        self._limits = limits
        own_gpu = None if setup.processor else self.gpu
        self._port = ControlledDevice(kernel, own_gpu, self.ledger, self._on_choice_expired)
        observe = observer.chosen if observer is not None else None
        self.controller = StepLoop(policy.steps, self._port, observe) if policy.steps else None
        # A journal records every request in the queue, and step control sees every request.
        self._may_skip_queue = journal is None and self.controller is None
        self._changed = False
        self._touched: list[SimEngine] = []
        self._tick_due = False

    @property
    def homes(self) -> tuple[SimDevice, ...]:
        """Devices with queued requests that may start when memory is freed here: this device and
        the homes of its guests."""
        if self._homes is None:
            self._homes = tuple(dict.fromkeys((self, *(guest.home for guest in self.guests))))
        return self._homes

    def room_bytes(self) -> int:
        """Returns the memory available to requests: free memory less that of queued activations,
        and the memory of unused cached prefixes."""
        ledger = self.ledger
        room = ledger.capacity_bytes - ledger.reserved_bytes - self.pending_bytes
        return room + idle_bytes(self.site) if self.site.reuses else room

    def host(self, guest: Resident) -> None:
        self.guests.append(guest)
        self._homes = None

    def unhost(self, guest: Resident) -> None:
        self.guests.remove(guest)
        self._homes = None

    def speed_tokens_per_s(self, model: ModelSetup) -> float:
        """Returns the prefill speed that the model's engines measured on this device."""
        measured = self.speeds.get(model.name)
        first = model.speed_tokens_per_s or model.prefill_tokens_per_s
        return (measured.tokens_per_s if measured is not None else 0.0) or first

    # --- the queue --------------------------------------------------------------------------

    def on_arrival(self, resident: Resident, request: SimRequest) -> None:
        """Starts an arriving request at once if possible, else enqueues it."""
        resident.last_use_s = self._kernel.time_s
        request.device = self.number
        if not self._start_alone(resident, request):
            self.enqueue(resident, request)
            self.try_dispatch()

    def _start_alone(self, resident: Resident, request: SimRequest) -> bool:
        """Starts a request without enqueueing it. Returns False if others wait or it cannot start
        now."""
        engine = resident.engine
        if engine is None or self.site.starved or not self._may_skip_queue or len(self.scheduler):
            return False
        if not self._surely_starts(resident, engine, request):
            _sync_memory(resident, engine)
            view = _engine_view(resident, engine)
            if not self.scheduler.would_start_now(
                view, request.prompt_tokens, request.output_tokens
            ):
                return False
        engine.admit((request,))
        engine.start_next()
        return True

    def _surely_starts(self, resident: Resident, engine: SimEngine, request: SimRequest) -> bool:
        """Returns True if memory suffices regardless of the runs in flight and nothing else delays
        the request. The scheduler then needs no view to admit it."""
        if resident.stage is not Stage.ACTIVE or engine.running >= engine.max_running:
            return False
        prompts = engine.prompts
        if prompts.ready and prompts.pending_s() > self._limits.prefill_horizon_s:
            return False
        kv = engine.kv
        blocks = kv.blocks(request.prompt_tokens + self._limits.headroom_tokens)
        need_bytes = kv.bytes_of(blocks + engine.running * kv.step_blocks)
        if need_bytes > kv.left_bytes():
            return False
        for device in resident.devices:
            if need_bytes > device.ledger.spare_bytes - device.pending_bytes:
                return False
        return True

    def enqueue(self, resident: Resident, request: SimRequest) -> None:
        """Adds a request to the queue; `try_dispatch` starts it."""
        resident.last_use_s = self._kernel.time_s
        request.device = self.number
        self._changed = True
        if self.controller is not None and resident.engine is not None:
            if self._observer is not None:
                self._observer.added(_waiting(resident, request))
            resident.engine.admit([request])
            return
        resident.queue[str(request.index)] = request
        self.scheduler.add(_waiting(resident, request))

    def receive(self, resident: Resident, requests: Sequence[SimRequest]) -> None:
        """Moves running requests of another copy into this one's engine. REQUIRES: it is active."""
        assert resident.engine is not None
        resident.last_use_s = self._kernel.time_s
        for request in requests:
            request.device = self.number
        resident.engine.take_over(requests)
        self._changed = True
        if self.controller is None:
            self._touched.append(resident.engine)
        self.try_dispatch()

    def withdraw(self, resident: Resident) -> list[SimRequest]:
        """Removes and returns the copy's waiting requests, in the order of enqueueing."""
        left, resident.queue = resident.queue, {}
        self.scheduler.remove(left)
        return list(left.values())

    def try_dispatch(self) -> None:
        """Starts all requests that can start now. Called after every change."""
        if self.controller is not None:
            self._consult(self.controller)
            return
        if self.site.starved:
            self._readmit()
        if len(self.scheduler):
            now_s = self._kernel.time_s
            plan = self.scheduler.step(now_s, _engine_views(self.residents.values(), now_s))
            for model, keys in plan.starts.items():
                self._start(self.residents[model], keys)
            if len(self.scheduler):
                self._schedule_tick()
        if self._touched:
            touched, self._touched = self._touched, []
            for engine in touched:
                engine.start_next()

    def _start(self, resident: Resident, keys: Sequence[str]) -> None:
        assert resident.engine is not None
        resident.engine.admit([resident.queue.pop(key) for key in keys])
        self._touched.append(resident.engine)

    def _readmit(self) -> None:
        for resident in self.residents.values():
            engine = resident.engine
            if engine is not None and engine.prompts.retracted:
                engine.readmit()
                self._touched.append(engine)

    def note_change(self) -> None:
        """Makes the next dispatch end the runs that step control started. Called when a request
        ends."""
        self._changed = True

    def _on_choice_expired(self, number: int) -> None:
        if self.controller is not None and self.controller.is_last(number):
            self.note_change()
            self.try_dispatch()

    def _consult(self, controller: StepLoop) -> None:
        engines: dict[str, ControlledEngine] = {}
        for name, resident in self.residents.items():
            if isinstance(resident.engine, ControlledEngine) and not resident.engine.stopping:
                engines[name] = resident.engine
                if resident.waiting:
                    # They arrived before the engine was active.
                    resident.engine.admit(self.withdraw(resident))
        self._port.engines = engines
        changed, self._changed = self._changed, False
        controller.consult(changed=changed)

    def _schedule_tick(self) -> None:
        """Schedules a dispatch, since deadlines pass and holds end without an event."""
        if not self._tick_due:
            self._tick_due = True
            self._kernel.after(self._limits.order_age_s, self._tick)

    def _tick(self) -> None:
        self._tick_due = False
        if len(self.scheduler):
            self.try_dispatch()


def _waiting(resident: Resident, request: SimRequest) -> Waiting:
    return Waiting(
        str(request.index),
        resident.model.name,
        request.todo_tokens,
        request.output_tokens,
        request.queued_s,
        request.deadline_s,
        priority=request.priority,
    )


def _engine_views(residents: Iterable[Resident], now_s: float) -> Sequence[EngineView]:
    """Returns the views of the copies with requests that wait in the queue or for their prefill."""
    found: list[tuple[Resident, SimEngine | None]] = []
    for resident in residents:
        engine = resident.engine
        if resident.waiting or (engine is not None and engine.prompts.ready):
            found.append((resident, engine))
    for resident, engine in found:
        _sync_memory(resident, engine)
    return [
        _activating_view(resident, now_s) if engine is None else _engine_view(resident, engine)
        for resident, engine in found
    ]


def _sync_memory(resident: Resident, engine: SimEngine | None) -> None:
    """Brings the ledgers of the copy's devices up to the present time."""
    if engine is not None:
        engine.run.catch_up()
    for device in resident.devices:
        if device.gpu.jobs:
            device.site.sync()


def _engine_view(resident: Resident, engine: SimEngine) -> EngineView:
    """Returns the view of an engine. REQUIRES: the memory is synced."""
    kv, account = engine.kv, engine.kv.accounts[0]
    quantum_bytes, quantum_tokens, kv_bytes = kv.quantum_bytes, kv.quantum_tokens, kv.kv_bytes
    free_bytes = min([d.room_bytes() for d in resident.devices])
    shared = free_bytes // quantum_bytes * quantum_tokens if free_bytes > 0 else 0
    guaranteed = 0
    if account.min_bytes > kv_bytes:
        guaranteed = (account.min_bytes - kv_bytes) // quantum_bytes * quantum_tokens
    held_blocks = kv.live_blocks
    if idle_blocks := kv.idle_blocks:
        # `shared` already includes the memory of unused cached prefixes, the model's own too.
        freeable_bytes = max([returnable_bytes(kv, d.site) for d in resident.devices])
        held_blocks += freeable_bytes // quantum_bytes * kv.quantum_blocks - idle_blocks
    own = kv.quanta * quantum_tokens - held_blocks * kv.block_tokens + guaranteed
    limit: int | None = None
    if account.limit_bytes is not None:
        left_bytes = account.limit_bytes - max(account.min_bytes, kv_bytes)
        limit = max(0, left_bytes) // quantum_bytes * quantum_tokens
    if engine.prompts.retracted:
        own = shared = guaranteed = 0
    return EngineView(
        resident.model.name,
        own + (shared if limit is None else min(shared, limit)),
        engine.running,
        engine.max_running,
        kv.block_tokens,
        engine.prompts.tokens_per_s,
        engine.prompts.pending_s(),
        0.0 if resident.stage is Stage.ACTIVE else READY_SOON_S,
        shared,
        max(1, quantum_bytes // quantum_tokens),
        quantum_tokens,
        guaranteed,
        limit,
        window_tokens=kv.need.window_tokens,
        window_share=kv.need.window_share,
        state_tokens=kv.need.state_tokens,
    )


def _activating_view(resident: Resident, now_s: float) -> EngineView:
    left_s = resident.ready_s - now_s
    speed = resident.home.speed_tokens_per_s(resident.model)
    return EngineView(resident.model.name, 0, 0, 0, 1, speed, ready_in_s=max(READY_SOON_S, left_s))
