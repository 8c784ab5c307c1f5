"""Devices: a GPU, or host RAM of a fixed capacity that replaces one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import kvcached._core as _core
from kvcached.balloon import Holder, ShrinkAnswer, ShrinkPolicy, spares_then_idle_caches
from kvcached.checks import (
    checked,
    duration,
    flag,
    function,
    namespace_name,
    not_negative,
    optional,
    positive,
    process_id,
    text,
)
from kvcached.client import Client
from kvcached.driver.driver_memory import (
    MemoryDrift,
    capacity_shortfall,
    drift,
    gpu_memory,
    host_memory,
)
from kvcached.errors import (
    ClosedError,
    DeviceBusyError,
    DeviceOccupiedError,
    InvalidArgumentError,
    LedgerCorruptError,
    LedgerPermissionError,
    LedgerVersionError,
    UnknownClientError,
    UnknownDeviceError,
)
from kvcached.memory_requests import ShrinkOrder, ask_for, order_shrink
from kvcached.usage import ClientUsage, DeviceUsage, DriverMemory

SHM_DIR = Path("/dev/shm")
DEFAULT_PAGE_BYTES = 2 << 20


@checked(name=text, namespace=namespace_name)
def segment_path(name: str, namespace: str = "default") -> Path:
    """Returns the path of a device's ledger.

    Raises UnknownDeviceError, BackendUnavailableError.
    """
    _core.check_device_name(name)
    return SHM_DIR / f"prism-kvcached.{namespace}.{name}"


def _client(name: str, value: str | int) -> str | int:
    return text(name, value) if isinstance(value, str) else process_id(name, value)


class _ClientQuery(NamedTuple):
    """Clients that a call selects. A part that is None matches every client."""

    name: str | None
    pid: int | None
    number: int | None

    @classmethod
    def of(cls, client: str | int | None, pid: int | None, number: int | None) -> _ClientQuery:
        if not isinstance(client, int):
            return cls(client, pid, number)
        if pid is None:
            return cls(None, client, number)
        raise InvalidArgumentError("client is already a pid; pass a name, or leave out pid")

    def matches(self, holder: Holder) -> bool:
        found = (holder.name, holder.pid, holder.key[1])
        return all(part in (None, its) for part, its in zip(self, found, strict=True))


def _until_ns(wait_s: float) -> int:
    return time.monotonic_ns() + int(wait_s * 1e9)


def _resident_bytes(record: _core.ClientRecord) -> int | None:
    try:
        return record.resident_bytes()
    except LedgerPermissionError:
        return None


class Device:
    """A device that all processes of one namespace share.

    Usable from any thread, and by children after a fork, since opening one makes no call to CUDA.
    """

    def __init__(self, name: str, namespace: str, ledger: _core.Ledger) -> None:
        self.name = name
        self.namespace = namespace
        self._ledger: _core.Ledger | None = ledger

    def __repr__(self) -> str:
        state = "" if self._ledger else ", closed"
        return f"Device({self.name!r}, namespace={self.namespace!r}{state})"

    @classmethod
    @checked(capacity_bytes=positive, page_bytes=positive)
    def open(
        cls,
        name: str,
        *,
        capacity_bytes: int | None = None,
        page_bytes: int | None = None,
        namespace: str = "default",
    ) -> Device:
        """Creates the device's ledger, or attaches to it.

        With `capacity_bytes` None it only attaches. `page_bytes` defaults to 2 MiB with a capacity,
        else to the ledger's page size. Raises UnknownDeviceError, BackendUnavailableError,
        AlignmentError, DeviceMismatchError, LedgerVersionError, LedgerPermissionError,
        SharedMemoryFullError.
        """
        path = segment_path(name, namespace)
        if capacity_bytes is not None and page_bytes is None:
            page_bytes = DEFAULT_PAGE_BYTES
        return cls(name, namespace, _core.Ledger.open(str(path), capacity_bytes, page_bytes))

    @property
    def capacity_bytes(self) -> int:
        """Capacity of the device in bytes."""
        return self._open_ledger().capacity_bytes

    @property
    def page_bytes(self) -> int:
        """Granularity of mapping in bytes."""
        return self._open_ledger().page_bytes

    def usage(self) -> DeviceUsage:
        """Returns one coherent read of the ledger, after freeing the records of dead clients."""
        return self._usage(*self._open_ledger().usage())

    def _usage(self, charged_bytes: int, records: Sequence[_core.ClientRecord]) -> DeviceUsage:
        ledger = self._open_ledger()
        clients = tuple(ClientUsage.of(record) for record in records)
        return DeviceUsage(
            capacity_bytes=ledger.capacity_bytes,
            page_bytes=ledger.page_bytes,
            reserved_bytes=charged_bytes,
            committed_bytes=sum(client.committed_bytes for client in clients),
            static_bytes=sum(client.static_bytes for client in clients),
            free_bytes=max(0, ledger.capacity_bytes - charged_bytes),
            clients=clients,
        )

    def resident_bytes(self) -> int:
        """Returns the bytes of physical memory of all live clients' pages, as the OS counts them.

        On a GPU, whose memory the OS does not see, returns the bytes that the clients have
        committed. No reservation is granted during the count, so that a page which moves from one
        client to another is not counted twice. Raises LedgerPermissionError if a client belongs to
        a user or pid namespace whose files cannot be read.
        """
        return self._open_ledger().resident_bytes()

    def residency(self) -> tuple[DeviceUsage, tuple[int | None, ...]]:
        """Returns `usage`, and for each of its clients the physical bytes of its pages.

        The bytes are counted by the OS, and None where this user or pid namespace lacks permission.
        They are read one client after another while reservations continue; `resident_bytes` is the
        coherent sum.
        """
        charged_bytes, records = self._open_ledger().usage()
        usage = self._usage(charged_bytes, records)
        return usage, tuple(_resident_bytes(record) for record in records)

    def driver_memory(self) -> DriverMemory | None:
        """Returns the device's memory as the driver counts it, or None if that is not available.

        Makes no CUDA context and uses no CUDA: NVML for a GPU, the OS's count of the clients' pages
        for a host device. The GPU is the one that CUDA_VISIBLE_DEVICES maps the name to. Raises
        UnknownDeviceError, HiddenDeviceError, UnsupportedDeviceError.
        """
        if self.name.startswith("cuda:"):
            return gpu_memory(self.name)
        return host_memory(*self.residency())

    def compare_with_driver(self) -> MemoryDrift | None:
        """Compares the ledger's figure with `driver_memory`, read one after the other."""
        memory = self.driver_memory()
        return None if memory is None else drift(memory, self.usage())

    @checked(wait_s=duration)
    def check_capacity(self, wait_s: float = 0.0) -> None:
        """Raises DeviceOccupiedError if processes outside of the ledger hold part of its capacity.

        Waits up to `wait_s` for that memory to be freed, since a process that was just killed still
        holds memory. A host device's capacity must not be above the machine's memory. Call it after
        `open`. Does nothing where `driver_memory` is not available.
        """
        deadline = time.monotonic() + wait_s
        while (
            problem := capacity_shortfall(self.name, self.driver_memory(), self.usage())
        ) is not None:
            if time.monotonic() >= deadline:
                raise DeviceOccupiedError(problem)
            time.sleep(0.05)

    @checked(
        name=text,
        min_bytes=not_negative,
        limit_bytes=not_negative,
        shrink_policy=function,
        background=flag,
        guard_holes=flag,
    )
    def client(
        self,
        name: str,
        *,
        min_bytes: int = 0,
        limit_bytes: int | None = None,
        shrink_policy: ShrinkPolicy = spares_then_idle_caches,
        background: bool = True,
        guard_holes: bool = False,
    ) -> Client:
        """Registers this process in the ledger. The client's memory is freed when the process ends.

        Args:
            name: The client's name in the ledger.
            min_bytes: Guaranteed bytes of pages.
            limit_bytes: Limit of its pages.
            shrink_policy: Decides which clients are asked for memory when this one waits.
            background: Allows a thread that keeps spare pages between their watermarks
                (`KVCache.set_premapped_pages`). It starts with the first low watermark above 0.
                Without it the client's own calls do that.
            guard_holes: Calls `Client.guard_holes` before any KV cache exists, for GPUs under MPS.

        Raises NoRoomError if the minimum, or the guard page, is not free, TooManyClientsError,
        DeviceGoneError. On `cuda:N` raises UnknownDeviceError if there is no such GPU,
        HiddenDeviceError if CUDA_VISIBLE_DEVICES may be the cause, UnsupportedDeviceError,
        AlignmentError if page_bytes is not the driver's granularity times a power of two,
        ForkedClientError in the child of a process that had used CUDA.
        """
        ledger = self._open_ledger()
        core = _core.Client.open(ledger, self.name, name, min_bytes, limit_bytes, background)
        client = Client(core, name, ledger.page_bytes, shrink_policy)
        if guard_holes:
            try:
                client.guard_holes()
            except BaseException:
                client.close()
                raise
        return client

    @checked(client=_client, limit_bytes=optional(not_negative), pid=process_id, number=positive)
    def set_limit(
        self,
        client: str | int,
        limit_bytes: int | None,
        *,
        pid: int | None = None,
        number: int | None = None,
    ) -> None:
        """Limits the pages of a client of any process. None lifts the limit.

        `client` is a name or a pid. `pid` tells clients of one name apart, `number`
        (`ClientUsage.number`) those of one name and process.

        The limit applies from the client's next reservation. A limit below what is held stops
        growth, and the client is asked to shrink to it (`Client.shrink_request`). Pages without a
        live block are returned within 0.1 s if the client's thread runs
        (`KVCache.set_premapped_pages`). Raises UnknownClientError, AmbiguousClientError,
        InvalidArgumentError below the client's minimum.
        """
        self._open_ledger().set_limit(*_ClientQuery.of(client, pid, number), limit_bytes)

    @checked(client=_client, min_bytes=not_negative, pid=process_id, number=positive)
    def set_min(
        self,
        client: str | int,
        min_bytes: int,
        *,
        pid: int | None = None,
        number: int | None = None,
    ) -> None:
        """Guarantees pages to a client of any process, selected as in `set_limit`.

        Raises UnknownClientError, AmbiguousClientError, NoRoomError if they are not free,
        InvalidArgumentError above the client's limit.
        """
        self._open_ledger().set_min(*_ClientQuery.of(client, pid, number), min_bytes)

    def shrink(
        self,
        client: str | int | None = None,
        size_bytes: int | None = None,
        *,
        pid: int | None = None,
        number: int | None = None,
        wait_s: float = 1.0,
    ) -> tuple[ShrinkAnswer, ...]:
        """Asks clients, selected as in `set_limit` (default: all), to shrink, and waits.

        Each client is asked for `size_bytes`, or with None for all it can give up, even below its
        minimum. The `outcome` of a client that does not answer within `wait_s` (a stopped process,
        or an engine that never polls) says so. All clients of an ambiguous name are asked. Raises
        UnknownClientError.
        """
        order = self.order_shrink(client, size_bytes, pid=pid, number=number, wait_s=wait_s)
        return order.wait()

    @checked(client=_client, size_bytes=positive, pid=process_id, number=positive, wait_s=duration)
    def order_shrink(
        self,
        client: str | int | None = None,
        size_bytes: int | None = None,
        *,
        pid: int | None = None,
        number: int | None = None,
        wait_s: float = 1.0,
    ) -> ShrinkOrder:
        """Posts the requests of `shrink` and returns at once, for event loops.

        `ShrinkOrder.poll` returns the answers.
        """
        query = _ClientQuery.of(client, pid, number)

        def wanted(holders: Sequence[Holder]) -> list[Holder]:
            found = [holder for holder in holders if query.matches(holder)]
            if not found and any(part is not None for part in query):
                there = ", ".join(f"{h.name} (pid {h.pid})" for h in holders) or "none"
                raise UnknownClientError(f"no such client; clients: {there}")
            return found

        return order_shrink(self._open_ledger(), wanted, size_bytes, _until_ns(wait_s))

    @checked(missing_bytes=positive, for_client=text, within_s=duration, policy=function)
    def request_room(
        self,
        missing_bytes: int,
        *,
        for_client: str | None = None,
        within_s: float = 1.0,
        policy: ShrinkPolicy = spares_then_idle_caches,
    ) -> None:
        """Asks clients other than those named `for_client` to give back `missing_bytes` in sum.

        For schedulers that know of a need before an engine does. Bytes that clients were already
        asked for count as on their way. Returns at once and reserves nothing.
        """
        ask_for(
            self._open_ledger(),
            missing=lambda _view: missing_bytes,
            others=lambda holder: holder.name != for_client,
            policy=policy,
            until_ns=_until_ns(within_s),
        )

    def reap(self) -> int:
        """Frees the records of dead clients. Returns how many there were."""
        return self._open_ledger().reap()

    @checked(force=flag)
    def destroy(self, *, force: bool = False) -> None:
        """Removes the ledger and closes this object. The last process to leave calls it.

        Raises DeviceBusyError while any client lives. With `force`, live clients get
        DeviceGoneError at their next allocation instead.
        """
        self._open_ledger().destroy(force)
        self._ledger = None

    def close(self) -> None:
        """Detaches this object. Clients opened from it stay."""
        self._ledger = None

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    @checked(force=flag)
    def unlink(namespace: str, name: str, *, force: bool = False) -> bool:
        """Removes a device's ledger, of any creator. Returns False if there is none.

        Also removes a damaged ledger, or one of another library version. Unless `force`, raises
        DeviceBusyError while any client lives or, where clients cannot be read, while any process
        has the ledger open.
        """
        path = segment_path(name, namespace)
        try:
            _core.Ledger.open(str(path), None, None).destroy(force)
        except UnknownDeviceError:
            return False
        except (LedgerVersionError, LedgerCorruptError):
            if force:
                path.unlink(missing_ok=True)
            elif not _core.remove_if_stale(str(path)) and path.exists():
                raise DeviceBusyError(
                    f"a process has {path} open and may hold memory of the device; end it"
                ) from None
        return True

    def _open_ledger(self) -> _core.Ledger:
        if self._ledger is None:
            raise ClosedError("the device is closed; open it again")
        return self._ledger
