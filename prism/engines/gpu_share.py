"""Measurement and leases of an engine process's GPU memory outside of kvcached.

The CUDA context exists for the life of the process, and so does its lease. The rest of
`engine.static` is leased with each model and bounds torch's allocator. On a host device nothing is
measured or reported: a model takes the synthetic share.

The size of a context is the driver's figure for this process, if the driver lists processes. If
not, it is the device's loss of free memory during its creation, less what the ledger saw others
take. If that is implausible for a context, because another process allocated too, it is the
adapter's planned size.
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
from prism.config.checks.memory_needs import GpuNeeds
from prism.config.schema.machines import is_gpu
from prism.config.schema.units import format_size, whole_mib
from prism.engines.core import EngineContext
from prism.engines.room import await_room
from prism.errors import ActivationError, EngineError
from prism.messages.gpu_memory import OutsideMemory

CONTEXT = "CUDA context"
ROOM_S = 5.0  # time for others to make room for a context
READ_INTERVAL_S = 5.0
_ESTIMATE_RANGE = (0.25, 2.0)  # plausible sizes of a context, as factors of the planned one

log = logging.getLogger("prism.engine")

ReadDriver = Callable[[], DriverMemory | None]


class GpuShare:
    """Leases of one process's GPU memory outside of kvcached, which end with the client. Thread
    rule: the engine's thread."""

    def __init__(
        self,
        client: kvcached.Client,
        context: EngineContext,
        needs: GpuNeeds,
        read_driver: ReadDriver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._needs = needs
        self._read_driver = read_driver
        self._clock = clock
        self._ranks = context.ranks.size
        self._is_gpu = is_gpu(context.device)
        self._static_bytes = context.config.engine.static_on(context.device)
        self._leases: list[kvcached.StaticLease] = []
        self._idle_bytes = needs.idle_bytes  # upper bound of the lease without a model
        self._has_served = False
        self._model_bytes = 0
        self._driver_pid = 0
        self._outside: OutsideMemory | None = None
        self._read_at_s = float("-inf")
        self._reading: Future[DriverMemory | None] | None = None
        self._committed_bytes = 0  # when the driver was last read
        self._thread = ThreadPoolExecutor(1, "driver")

    @classmethod
    def open(
        cls, context: EngineContext, device: kvcached.Device, needs: GpuNeeds
    ) -> tuple[kvcached.Client, GpuShare]:
        """Creates the client and with it the CUDA context, which is measured and leased.

        Raises EngineError if the device has no room for a context, and the errors of
        `Device.client`.
        """
        if not is_gpu(context.device):
            client = device.client(context.engine_id)
            return client, cls(client, context, needs, lambda: None)
        try:  # a context is created only if the ledger has room for it
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
        """Bytes leased for the life of the process: its memory without a model."""
        return sum(lease.size_bytes for lease in self._leases)

    @property
    def torch_cap_bytes(self) -> int:
        """Bytes that torch's allocator may reserve: `engine.static` less the context with code that
        is loaded later, graphs and NCCL. 0 on a host device."""
        return max(0, self._static_bytes - self._other_than_torch_bytes) if self._is_gpu else 0

    @property
    def _other_than_torch_bytes(self) -> int:
        idle_bytes = max(self.context_bytes, self._needs.idle_bytes)
        return idle_bytes + self._needs.outside_torch_bytes(self._ranks)

    def model_bytes(self, adapter_bytes: int = 0) -> int:
        """Returns the bytes to lease for a model in addition to the context, with `adapter_bytes`
        for its LoRA adapters. Raises ActivationError if `engine.static` is too small for this GPU's
        context."""
        least_bytes = max(1, self._needs.torch_min_bytes)
        if self._is_gpu and self.torch_cap_bytes < least_bytes:
            raise ActivationError(
                f"engine.static: {format_size(self._static_bytes)} leaves torch"
                f" {format_size(self.torch_cap_bytes)} after the {format_size(self.context_bytes)}"
                " of this engine's CUDA context; set it to at least"
                f" {whole_mib(self._other_than_torch_bytes + least_bytes)}"
            )
        self._model_bytes = self._static_bytes - self.context_bytes + adapter_bytes
        return self._model_bytes

    def settle(self, *, served: bool = True) -> None:
        """Leases for the context what the process still holds after its model is gone.

        After the first model that was `served`, everything is leased, even beyond the plan: the
        model's code stays loaded, and a fresh process would load it again. What later models add,
        or what has no room, gets no lease, and is reported to the agent.
        """
        self._model_bytes = 0
        self._read_at_s = float("-inf")
        self._reading = None  # its figures would include the model
        held_bytes = self._held_bytes(self._read_driver()) if self._is_gpu else None
        if held_bytes is None:
            return
        held_bytes -= self._client.usage().committed_bytes
        if served and not self._has_served:
            self._has_served = True
            self._idle_bytes = max(self._idle_bytes, held_bytes)
        try:
            self._lease(min(self._idle_bytes, held_bytes))
        except NoRoomError as error:
            log.warning("the %s grew, but its lease cannot grow: %s", CONTEXT, error)
            self._lease_rest(error.free_bytes)

    def report(self, torch_bytes: Callable[[], int] = lambda: 0) -> OutsideMemory | None:
        """Returns the value of `EngineStatus.outside`, None on a host device.

        Reads the driver every READ_INTERVAL_S, and calls `torch_bytes` for the memory that torch's
        allocator holds. Until the driver has answered, the figures are those of the last answer.
        """
        if not self._is_gpu:
            return None
        if self._reading is None and self._clock() - self._read_at_s >= READ_INTERVAL_S:
            self._read_at_s = self._clock()
            self._committed_bytes = self._client.usage().committed_bytes
            self._reading = self._start_reading()
        if self._reading is not None and self._reading.done():
            memory, self._reading = self._reading.result(), None
            self._outside = self._measure(memory, torch_bytes())
        return self._outside

    def _start_reading(self) -> Future[DriverMemory | None]:
        """Reads the driver, in a thread while a model is served, so that its steps do not wait for
        a slow driver."""
        if self._model_bytes and self._outside is not None:
            return self._thread.submit(self._read_driver)
        answered: Future[DriverMemory | None] = Future()
        answered.set_result(self._read_driver())
        return answered

    # --- measuring -------------------------------------------------------------------------

    def _measure(self, memory: DriverMemory | None, torch_bytes: int) -> OutsideMemory:
        held_bytes = self._held_bytes(memory)
        usage = self._client.usage()
        # Pages that were unmapped since the driver was read are not memory outside of kvcached.
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
        """Returns the driver's figure for this process, None if it has none."""
        entries = memory.processes if memory is not None else ()
        used = (e.used_bytes for e in entries if e.pid == self._driver_pid)
        return next(used, None) if self._driver_pid else None

    def _lease_context(
        self, before: DriverMemory | None, after: DriverMemory | None, grown_bytes: int
    ) -> None:
        self._driver_pid = own_pid(before, after)
        held_bytes = self._held_bytes(after)
        size_bytes, how = held_bytes, "as the driver reports"
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
                return lost_bytes, "as free memory decreased"
        return planned_bytes, "as planned"

    def _lease(self, size_bytes: int) -> None:
        """Grows the context's leases to `size_bytes`, or releases later parts. Raises NoRoomError,
        after others had time to make room."""
        while self._leases[1:] and self.context_bytes - self._leases[-1].size_bytes >= size_bytes:
            self._leases.pop().release()
        page_bytes = self._client.page_bytes
        more_bytes = -(-(size_bytes - self.context_bytes) // page_bytes) * page_bytes
        if more_bytes > 0:
            self._leases.append(self._client.reserve_static(more_bytes, CONTEXT, wait_s=ROOM_S))

    def _lease_rest(self, free_bytes: int) -> None:
        """Leases the free memory. The next `settle` tries to lease the whole again."""
        page_bytes = self._client.page_bytes
        part_bytes = free_bytes // page_bytes * page_bytes
        if part_bytes > 0:
            with contextlib.suppress(NoRoomError):
                self._leases.append(self._client.reserve_static(part_bytes, CONTEXT))


def own_pid(before: DriverMemory | None, after: DriverMemory | None) -> int:
    """Returns the driver's pid for this process. In a container it may differ from this process's
    own; it is then the pid of the only new process. 0 if it is not known."""
    if before is None or after is None:
        return 0
    pids = {process.pid for process in after.processes}
    if os.getpid() in pids:
        return os.getpid()
    new = pids - {process.pid for process in before.processes}
    return new.pop() if len(new) == 1 else 0


def _no_room(name: str, error: KvcachedError) -> EngineError:
    return EngineError(
        f"{name} does not have room for an engine's {CONTEXT}: {error}; the agent retries; lower"
        " devices[].engines if this persists"
    )
