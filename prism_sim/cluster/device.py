"""Simulated device with its queue and local scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from prism.models.prefill_speed import Speed
from prism.policies.data import Waiting
from prism.policies.policy import Policy
from prism.scheduler.decision_journal import QueueJournal, Sink
from prism.scheduler.local_scheduler import Limits, LocalScheduler
from prism_sim.cluster.copies import Resident, Stage
from prism_sim.cluster.engine_views import engine_view, engine_views, sync_memory
from prism_sim.core.kernel import Kernel
from prism_sim.core.request import SimRequest
from prism_sim.core.setup import DeviceSetup, ModelSetup
from prism_sim.engine.compute import Gpu
from prism_sim.engine.controlled import ControlledEngine, StepController
from prism_sim.engine.engine import SimEngine
from prism_sim.engine.kv import MemorySite, idle_bytes
from prism_sim.engine.memory import Ledger


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
        self.scheduler = LocalScheduler(limits, policy.order, observer)
        self._limits = limits
        self.controller = (
            StepController(kernel, policy.steps, self.gpu, self.ledger, self._on_choice_expired)
            if policy.steps
            else None
        )
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
            sync_memory(resident, engine)
            view = engine_view(resident, engine)
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
        need_bytes = kv.bytes_of(blocks + engine.running)
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
            plan = self.scheduler.step(now_s, engine_views(self.residents.values(), now_s))
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

    def _on_choice_expired(self) -> None:
        """Consults step control again."""
        self.note_change()
        self.try_dispatch()

    def _consult(self, controller: StepController) -> None:
        engines: dict[str, ControlledEngine] = {}
        for name, resident in self.residents.items():
            if isinstance(resident.engine, ControlledEngine) and not resident.engine.stopping:
                engines[name] = resident.engine
                if resident.waiting:
                    # They arrived before the engine was active.
                    resident.engine.admit(self.withdraw(resident))
        changed, self._changed = self._changed, False
        controller.consult(engines, changed)

    def _schedule_tick(self) -> None:
        """Schedules a dispatch, since deadlines pass and holds end without an event."""
        if not self._tick_due:
            self._tick_due = True
            self._kernel.after(self._limits.order_age_s, self._tick)

    def _tick(self) -> None:
        self._tick_due = False
        if len(self.scheduler):
            self.try_dispatch()
