"""What an engine process holds on its GPU outside of kvcached, measured and leased.

The CUDA context is there from the process's first moment to its last, and so is its lease. The
rest of `engine.static` is leased with each model and bounds torch's allocator. On a host device
there is nothing to measure: a model takes the synthetic share, and nothing is reported.

The size of a context is the driver's figure of this process, if the driver names its processes. If
not, it is what the device lost meanwhile, less what the ledger saw others take. If that cannot be
one context, because another process allocated too, it is what the adapter plans for one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import kvcached
from kvcached import DriverMemory, KvcachedError, NoRoomError
from prism.config.machines import is_gpu
from prism.config.memory import GpuNeeds
from prism.config.units import format_size, whole_mib
from prism.engines.core import EngineContext
from prism.engines.room import await_room
from prism.errors import ActivationError, EngineError
from prism.messages.gpu import OutsideMemory

CONTEXT = "CUDA context"
ROOM_S = 5.0  # for others to make room for a context
LOOK_EVERY_S = 5.0
_ESTIMATE_RANGE = (0.25, 2.0)  # of the planned context, for what the device lost meanwhile

log = logging.getLogger("prism.engine")

Look = Callable[[], DriverMemory | None]


class GpuShare:
    """Thread rule: the engine's thread. The leases end with the client."""

    def __init__(
        self,
        client: kvcached.Client,
        context: EngineContext,
        needs: GpuNeeds,
        look: Look,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._needs = needs
        self._look = look
        self._clock = clock
        self._ranks = context.ranks.size
        self._is_gpu = is_gpu(context.device)
        self._static_bytes = context.config.engine.static_on(context.device)
        self._leases: list[kvcached.StaticLease] = []
        self._idle_bytes = needs.idle_bytes  # the most that is leased without a model
        self._has_served = False
        self._model_bytes = 0
        self._driver_pid = 0
        self._outside: OutsideMemory | None = None
        self._looked_s = float("-inf")
        self._asking: Future[DriverMemory | None] | None = None
        self._committed_bytes = 0  # as the driver was asked
        self._thread = ThreadPoolExecutor(1, "driver")

    @classmethod
    def open(
        cls, context: EngineContext, device: kvcached.Device, needs: GpuNeeds
    ) -> tuple[kvcached.Client, GpuShare]:
        """Makes the client, and with it the CUDA context, which is measured and leased.

        Raises EngineError if the device has no room for a context, and what `Device.client` raises.
        """
        if not is_gpu(context.device):
            client = device.client(context.engine_id)
            return client, cls(client, context, needs, lambda: None)
        try:  # no context is made without room in the ledger
            await_room(device, needs.context_bytes, ROOM_S)
        except NoRoomError as error:
            raise _no_room(context.device, error) from error
        before, pages_before = device.driver_memory(), device.usage().committed_bytes
        # Under MPS a stray read must not end the GPU's other clients.
        client = device.client(context.engine_id, guard_holes=context.config.engine.mps)
        share = cls(client, context, needs, device.driver_memory)
        try:
            grown_bytes = device.usage().committed_bytes - pages_before
            share._lease_context(before, device.driver_memory(), grown_bytes)
        except NoRoomError as error:
            client.close()
            raise _no_room(context.device, error) from error
        return client, share

    @property
    def context_bytes(self) -> int:
        """Leased for the process's life: what it holds without a model."""
        return sum(lease.size_bytes for lease in self._leases)

    @property
    def torch_cap_bytes(self) -> int:
        """What torch's allocator may reserve: `engine.static` less the context with the code that
        is loaded yet, graphs and NCCL. 0 on a host device."""
        return max(0, self._static_bytes - self._beside_torch_bytes) if self._is_gpu else 0

    @property
    def _beside_torch_bytes(self) -> int:
        idle_bytes = max(self.context_bytes, self._needs.idle_bytes)
        return idle_bytes + self._needs.beside_torch_bytes(self._ranks)

    def model_bytes(self, adapter_bytes: int = 0) -> int:
        """What is leased on top for a model, `adapter_bytes` for its adapters among it. Raises
        ActivationError if `engine.static` is too small for this GPU's context."""
        least_bytes = max(1, self._needs.torch_min_bytes)
        if self._is_gpu and self.torch_cap_bytes < least_bytes:
            raise ActivationError(
                f"engine.static: {format_size(self._static_bytes)} leaves torch"
                f" {format_size(self.torch_cap_bytes)} beside the {format_size(self.context_bytes)}"
                " of this engine's CUDA context; set it to at least"
                f" {whole_mib(self._beside_torch_bytes + least_bytes)}"
            )
        self._model_bytes = self._static_bytes - self.context_bytes + adapter_bytes
        return self._model_bytes

    def settle(self, *, served: bool = True) -> None:
        """The model is gone. What the process still holds becomes the context's lease.

        After the first model that was `served` this is all of it, whatever was planned: its code
        stays, and a fresh process would load it again. What later models add, or what has no room,
        gets no lease, and the agent sees it.
        """
        self._model_bytes = 0
        self._looked_s = float("-inf")
        self._asking = None  # it would tell of the model
        held_bytes = self._held_bytes(self._look()) if self._is_gpu else None
        if held_bytes is None:
            return
        held_bytes -= self._client.usage().committed_bytes
        if served and not self._has_served:
            self._has_served = True
            self._idle_bytes = max(self._idle_bytes, held_bytes)
        try:
            self._lease(min(self._idle_bytes, held_bytes))
        except NoRoomError as error:
            log.warning("the %s grew, and there is no room for its lease: %s", CONTEXT, error)
            self._lease_rest(error.free_bytes)

    def report(self, torch_bytes: Callable[[], int] = lambda: 0) -> OutsideMemory | None:
        """For `EngineStatus.outside`; None on a host device. Asks the driver, and for what torch's
        allocator holds, every LOOK_EVERY_S. Until the driver has answered, the figures are those of
        its last answer."""
        if not self._is_gpu:
            return None
        if self._asking is None and self._clock() - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = self._clock()
            self._committed_bytes = self._client.usage().committed_bytes
            self._asking = self._ask()
        if self._asking is not None and self._asking.done():
            memory, self._asking = self._asking.result(), None
            self._outside = self._measure(memory, torch_bytes())
        return self._outside

    def _ask(self) -> Future[DriverMemory | None]:
        """In a thread while a model is served, whose steps would wait for a slow driver."""
        if self._model_bytes and self._outside is not None:
            return self._thread.submit(self._look)
        answered: Future[DriverMemory | None] = Future()
        answered.set_result(self._look())
        return answered

    # --- measuring -------------------------------------------------------------------------

    def _measure(self, memory: DriverMemory | None, torch_bytes: int) -> OutsideMemory:
        held_bytes = self._held_bytes(memory)
        usage = self._client.usage()
        # Pages that went since the driver was asked were no memory outside of them.
        committed_bytes = max(self._committed_bytes, usage.committed_bytes)
        # An activation that found no room leased nothing for its model.
        leased_bytes = min(self.context_bytes + self._model_bytes, usage.static_bytes)
        other_bytes, source = 0, "estimate"
        if held_bytes is not None:
            weight_bytes = max(0, usage.static_bytes - leased_bytes)
            outside_bytes = held_bytes - committed_bytes - weight_bytes
            other_bytes = max(0, outside_bytes - self.context_bytes - torch_bytes)
            source = "process"
        return OutsideMemory(
            leased_bytes=leased_bytes,
            context_bytes=self.context_bytes,
            torch_bytes=torch_bytes,
            other_bytes=other_bytes,
            driver_pid=self._driver_pid,
            source=source,
        )

    def _held_bytes(self, memory: DriverMemory | None) -> int | None:
        """What the driver says that this process holds."""
        entries = memory.processes if memory is not None else ()
        used = (e.used_bytes for e in entries if e.pid == self._driver_pid)
        return next(used, None) if self._driver_pid else None

    def _lease_context(
        self, before: DriverMemory | None, after: DriverMemory | None, grown_bytes: int
    ) -> None:
        self._driver_pid = own_pid(before, after)
        held_bytes = self._held_bytes(after)
        size_bytes, how = held_bytes, "its driver's figure"
        if size_bytes is None:
            size_bytes, how = self._estimate(before, after, grown_bytes)
        self._lease(size_bytes)
        self._idle_bytes = max(self._idle_bytes, self.context_bytes)
        log.info("%s: %d bytes, %s", CONTEXT, self.context_bytes, how)

    def _estimate(
        self, before: DriverMemory | None, after: DriverMemory | None, grown_bytes: int
    ) -> tuple[int, str]:
        planned_bytes = self._needs.context_bytes
        if before is not None and after is not None:
            lost_bytes = before.free_bytes - after.free_bytes - grown_bytes
            low, high = (factor * planned_bytes for factor in _ESTIMATE_RANGE)
            if low <= lost_bytes <= high and lost_bytes > 0:
                return lost_bytes, "what the device lost as it was made"
        return planned_bytes, "as planned"

    def _lease(self, size_bytes: int) -> None:
        """Makes the context's leases so large; a part that came later may go again. Raises
        NoRoomError, after others had time to make room."""
        while self._leases[1:] and self.context_bytes - self._leases[-1].size_bytes >= size_bytes:
            self._leases.pop().release()
        page_bytes = self._client.page_bytes
        more_bytes = -(-(size_bytes - self.context_bytes) // page_bytes) * page_bytes
        if more_bytes > 0:
            self._leases.append(self._client.reserve_static(more_bytes, CONTEXT, wait_s=ROOM_S))

    def _lease_rest(self, free_bytes: int) -> None:
        """What room there is; the next model's end asks for the whole again."""
        page_bytes = self._client.page_bytes
        part_bytes = free_bytes // page_bytes * page_bytes
        if part_bytes > 0:
            with contextlib.suppress(NoRoomError):
                self._leases.append(self._client.reserve_static(part_bytes, CONTEXT))


def own_pid(before: DriverMemory | None, after: DriverMemory | None) -> int:
    """This process's number among the driver's: its own, or, as a container may number it
    otherwise, that of the only process that came. 0: the driver does not tell."""
    if before is None or after is None:
        return 0
    there = {process.pid for process in after.processes}
    if os.getpid() in there:
        return os.getpid()
    came = there - {process.pid for process in before.processes}
    return came.pop() if len(came) == 1 else 0


def _no_room(name: str, error: KvcachedError) -> EngineError:
    return EngineError(
        f"{name} has no room for an engine's {CONTEXT}: {error}; it is tried again, or lower"
        " devices[].engines"
    )
