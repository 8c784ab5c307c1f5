"""One device: its queue, its local scheduler, and the engines whose rank 0 is here."""

from __future__ import annotations

from collections.abc import Sequence

from prism.models.prefill_speed import Speed
from prism.policies.policy import Policy
from prism.scheduler.journal import QueueJournal, Sink
from prism.scheduler.local import Limits, LocalScheduler, Waiting
from prism.scheduler.ports import EngineView
from prism_sim.cluster.resident import Resident, Stage
from prism_sim.core.kernel import Kernel
from prism_sim.core.request import SimRequest
from prism_sim.core.setup import DeviceSetup, ModelSetup
from prism_sim.engine.compute import Gpu
from prism_sim.engine.controlled import ControlledEngine, StepController
from prism_sim.engine.engine import SimEngine
from prism_sim.engine.kv import MemorySite, idle_bytes, returnable_bytes
from prism_sim.engine.memory import Ledger

# An activation that takes longer than expected is expected to end after this (as the live agent).
READY_SOON_S = 0.05


class SimDevice:
    """Carries out the local scheduler's plans on one simulated device. number: of the device in the
    cluster, as in `Records`. gpu: one that it shares, default one of its own. journal: where its
    queue's records go."""

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
        # model -> the copy whose rank 0 is here
        self.residents: dict[str, Resident] = {}
        # copies that have any rank here
        self.guests: list[Resident] = []
        # model -> of its prefills here, which outlives its copies
        self.speeds: dict[str, Speed] = {}
        self._homes: tuple[SimDevice, ...] | None = None
        # what activations wait for; admission leaves it alone, so that those that run now do not
        # starve the newcomer
        self.pending_bytes = 0
        observer = None if journal is None else QueueJournal(journal, kernel.now_s)
        self.scheduler = LocalScheduler(limits, policy.order, observer)
        self._limits = limits
        self.controller = (
            StepController(kernel, policy.steps, self.gpu, self.ledger, self._expired)
            if policy.steps
            else None
        )
        # a journal tells of every request in the queue, and step control of every request
        self._may_skip_queue = journal is None and self.controller is None
        self._changed = False
        self._touched: list[SimEngine] = []
        self._tick_due = False

    @property
    def homes(self) -> tuple[SimDevice, ...]:
        """Those whose queues memory freed here may let start: this one and its guests' homes."""
        if self._homes is None:
            self._homes = tuple(dict.fromkeys((self, *(guest.home for guest in self.guests))))
        return self._homes

    def room_bytes(self) -> int:
        """Free for requests: what no activation waits for, and what cached prefixes would give
        back."""
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
        """Of its prefills, as its engines here have measured it."""
        measured = self.speeds.get(model.name)
        first = model.speed_tokens_per_s or model.prefill_tokens_per_s
        return (measured.tokens_per_s if measured is not None else 0.0) or first

    # --- the queue --------------------------------------------------------------------------

    def on_arrival(self, resident: Resident, request: SimRequest) -> None:
        """A request arrives: it starts at once if it can, else it waits."""
        resident.last_use_s = self._kernel.time_s
        request.device = self.number
        if not self._start_alone(resident, request):
            self.enqueue(resident, request)
            self.try_dispatch()

    def _start_alone(self, resident: Resident, request: SimRequest) -> bool:
        """Nobody waits, and it can start: it needs no place in the queue."""
        engine = resident.engine
        if engine is None or self.site.starved or not self._may_skip_queue or len(self.scheduler):
            return False
        if not self._surely_starts(resident, engine, request):
            self._look(resident, engine)
            view = self._active_view(resident, engine)
            if not self.scheduler.would_start_now(
                view, request.prompt_tokens, request.output_tokens
            ):
                return False
        engine.admit((request,))
        engine.start_next()
        return True

    def _surely_starts(self, resident: Resident, engine: SimEngine, request: SimRequest) -> bool:
        """There is memory whatever the runs in flight still take, and nothing else to wait for: no
        view is needed to see that it `passes`."""
        if resident.stage is not Stage.ACTIVE or engine.running >= engine.max_running:
            return False
        if engine.prefills and engine.pending_prefill_s() > self._limits.prefill_horizon_s:
            return False
        kv = engine.kv
        blocks = kv.blocks(request.prompt_tokens + self._limits.headroom_tokens)
        need_bytes = kv.bytes_of(blocks + engine.running)
        if need_bytes > kv.left_bytes():
            return False
        for device in resident.devices:
            if need_bytes > device.ledger.spare_bytes - device.pending_bytes:
                return False
        return True

    def enqueue(self, resident: Resident, request: SimRequest) -> None:
        """`try_dispatch` lets it start."""
        resident.last_use_s = self._kernel.time_s
        request.device = self.number
        self._changed = True
        if self.controller is not None and resident.engine is not None:
            resident.engine.admit([request])
            return
        key = str(request.index)
        resident.queue[key] = request
        self.scheduler.add(
            Waiting(
                key,
                resident.model.name,
                request.todo_tokens,
                request.output_tokens,
                request.queued_s,
                request.deadline_s,
                priority=request.priority,
            )
        )

    def receive(self, resident: Resident, requests: Sequence[SimRequest]) -> None:
        """Requests of another copy go on in this one's engine. REQUIRES: it is active."""
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
        """The copy's waiting requests, in the order in which they came; they are here no more."""
        left, resident.queue = resident.queue, {}
        self.scheduler.remove(left)
        return list(left.values())

    def try_dispatch(self) -> None:
        """Something changed: start all that can start now."""
        if self.controller is not None:
            self._consult(self.controller)
            return
        if self.site.starved:
            self._readmit()
        if len(self.scheduler):
            plan = self.scheduler.step(self._kernel.time_s, self._views())
            for model, keys in plan.starts.items():
                self._start(self.residents[model], keys)
            if len(self.scheduler):
                self._expect_tick()
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
            if engine is not None and engine.retracted:
                engine.readmit()
                self._touched.append(engine)

    def note_change(self) -> None:
        """A request ended or came to its first token: step control is to be asked anew."""
        self._changed = True

    def _expired(self) -> None:
        """A choice of step control holds no more."""
        self.note_change()
        self.try_dispatch()

    def _consult(self, controller: StepController) -> None:
        engines: dict[str, ControlledEngine] = {}
        for name, resident in self.residents.items():
            if isinstance(resident.engine, ControlledEngine) and not resident.engine.stopping:
                engines[name] = resident.engine
                if resident.waiting:
                    # they came while the model was on its way
                    resident.engine.admit(self.withdraw(resident))
        changed, self._changed = self._changed, False
        controller.consult(engines, changed)

    def _expect_tick(self) -> None:
        """Deadlines pass and holds end without an event."""
        if not self._tick_due:
            self._tick_due = True
            self._kernel.after(self._limits.order_age_s, self._tick)

    def _tick(self) -> None:
        self._tick_due = False
        if len(self.scheduler):
            self.try_dispatch()

    # --- what the local scheduler sees ------------------------------------------------------

    def _views(self) -> Sequence[EngineView]:
        found: list[tuple[Resident, SimEngine | None]] = []
        for resident in self.residents.values():
            engine = resident.engine
            if resident.waiting or (engine is not None and engine.prefills):
                found.append((resident, engine))
        for resident, engine in found:
            self._look(resident, engine)
        return [
            self._coming_view(resident) if engine is None else self._active_view(resident, engine)
            for resident, engine in found
        ]

    def _look(self, resident: Resident, engine: SimEngine | None) -> None:
        """Memory that its devices' engines hold is as of now."""
        if engine is not None:
            engine.catch_up()
        for device in resident.devices:
            if device.gpu.jobs:
                device.site.sync()

    def _active_view(self, resident: Resident, engine: SimEngine) -> EngineView:
        kv, account = engine.kv, engine.kv.accounts[0]
        quantum_bytes, quantum_tokens, kv_bytes = kv.quantum_bytes, kv.quantum_tokens, kv.kv_bytes
        free_bytes = min([d.room_bytes() for d in resident.devices])
        shared = free_bytes // quantum_bytes * quantum_tokens if free_bytes > 0 else 0
        guaranteed = 0
        if account.min_bytes > kv_bytes:
            guaranteed = (account.min_bytes - kv_bytes) // quantum_bytes * quantum_tokens
        held_blocks = kv.live_blocks
        if idle_blocks := kv.idle_blocks:
            # what cached prefixes give back is shared, theirs too; else one step hands it out twice
            given_bytes = max([returnable_bytes(kv, d.site) for d in resident.devices])
            held_blocks += given_bytes // quantum_bytes * kv.quantum_blocks - idle_blocks
        own = kv.quanta * quantum_tokens - held_blocks * kv.block_tokens + guaranteed
        limit: int | None = None
        if account.limit_bytes is not None:
            left_bytes = account.limit_bytes - max(account.min_bytes, kv_bytes)
            limit = max(0, left_bytes) // quantum_bytes * quantum_tokens
        if engine.retracted:
            own = shared = guaranteed = 0
        return EngineView(
            resident.model.name,
            own + (shared if limit is None else min(shared, limit)),
            engine.running,
            engine.max_running,
            kv.block_tokens,
            engine.prefill_tokens_per_s,
            engine.pending_prefill_s(),
            0.0 if resident.stage is Stage.ACTIVE else READY_SOON_S,
            shared,
            max(1, quantum_bytes // quantum_tokens),
            quantum_tokens,
            guaranteed,
            limit,
        )

    def _coming_view(self, resident: Resident) -> EngineView:
        left_s = resident.ready_s - self._kernel.time_s
        speed = self.speed_tokens_per_s(resident.model)
        return EngineView(
            resident.model.name, 0, 0, 0, 1, speed, ready_in_s=max(READY_SOON_S, left_s)
        )
