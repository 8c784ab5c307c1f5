"""Devices: a GPU, or RAM of a fixed capacity that stands in for one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import kvcached._core as _core
from kvcached.asking import ShrinkOrder, ask_for, order_shrink
from kvcached.balloon import Holder, ShrinkAnswer, ShrinkPolicy, spares_then_idle_caches
from kvcached.checks import (
    checked,
    flag,
    function,
    namespace_name,
    not_negative,
    optional,
    patience,
    positive,
    process_id,
    text,
)
from kvcached.client import Client
from kvcached.driver_memory import MemoryDrift, ask_driver, ask_host, drift, lack
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
from kvcached.usage import ClientUsage, DeviceUsage, DriverMemory

SHM_DIR = Path("/dev/shm")
DEFAULT_PAGE_BYTES = 2 << 20


@checked(name=text, namespace=namespace_name)
def segment_path(name: str, namespace: str = "default") -> Path:
    """Where a device's ledger lies. Raises UnknownDeviceError, BackendUnavailableError."""
    _core.check_device_name(name)
    return SHM_DIR / f"prism-kvcached.{namespace}.{name}"


def _client(name: str, value: str | int) -> str | int:
    return text(name, value) if isinstance(value, str) else process_id(name, value)


class _ClientQuery(NamedTuple):
    """Which clients are meant, for the ledger; an absent part matches every client."""

    name: str | None
    pid: int | None
    number: int | None

    @classmethod
    def of(cls, client: str | int | None, pid: int | None, number: int | None) -> _ClientQuery:
        if not isinstance(client, int):
            return cls(client, pid, number)
        if pid is None:
            return cls(None, client, number)
        raise InvalidArgumentError("client is a pid already; give a name, or no pid beside it")

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
    """A device as all processes of one namespace share it. Usable from any thread, and by children
    after a fork: opening one makes no call to CUDA.
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

        `capacity_bytes` None attaches only. `page_bytes` defaults to 2 MiB with a capacity, else
        to what the ledger has. Raises UnknownDeviceError, BackendUnavailableError, AlignmentError,
        DeviceMismatchError, LedgerVersionError, LedgerPermissionError, SharedMemoryFullError.
        """
        path = segment_path(name, namespace)
        if capacity_bytes is not None and page_bytes is None:
            page_bytes = DEFAULT_PAGE_BYTES
        return cls(name, namespace, _core.Ledger.open(str(path), capacity_bytes, page_bytes))

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the device."""
        return self._open_ledger().capacity_bytes

    @property
    def page_bytes(self) -> int:
        """The granularity of mapping."""
        return self._open_ledger().page_bytes

    def usage(self) -> DeviceUsage:
        """One coherent read of the ledger; clients that died are freed first."""
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
        """Bytes of physical memory behind all live clients' pages, as the OS counts them.

        On a GPU, whose memory the OS does not see, the bytes that the clients have committed.
        No reservation is granted while it looks, so that a page which moves from one client to
        another is not counted twice. Raises LedgerPermissionError if a client belongs to a user or
        pid namespace whose files cannot be looked at.
        """
        return self._open_ledger().resident_bytes()

    def residency(self) -> tuple[DeviceUsage, tuple[int | None, ...]]:
        """`usage`, and for each of its clients the bytes of physical memory behind its pages.

        As the OS counts them, None where this user, or this pid namespace, may not look. They are
        read one after another while reservations go on; `resident_bytes` is the coherent sum.
        """
        charged_bytes, records = self._open_ledger().usage()
        usage = self._usage(charged_bytes, records)
        return usage, tuple(_resident_bytes(record) for record in records)

    def driver_memory(self) -> DriverMemory | None:
        """The device's memory as the driver counts it; None where it does not tell.

        Makes no CUDA context and uses no CUDA: by NVML, and on a host device from what the OS says
        of the clients' pages. The GPU is the one that CUDA_VISIBLE_DEVICES makes of the name.
        Raises UnknownDeviceError, HiddenDeviceError, UnsupportedDeviceError.
        """
        if self.name.startswith("cuda:"):
            return ask_driver(self.name)
        return ask_host(*self.residency())

    def compare_with_driver(self) -> MemoryDrift | None:
        """The ledger's figure beside `driver_memory`'s, read one after the other."""
        memory = self.driver_memory()
        return None if memory is None else drift(memory, self.usage())

    @checked(wait_s=patience)
    def check_capacity(self, wait_s: float = 0.0) -> None:
        """Raises DeviceOccupiedError if processes outside of the ledger hold memory that its
        capacity counts on, after waiting up to `wait_s` for it to come free.

        A host device's capacity must not be above the machine's memory. Call it after `open`: a
        process that was killed a moment ago still holds memory.
        Does nothing where the driver does not tell (`driver_memory`).
        """
        deadline = time.monotonic() + wait_s
        while (why := lack(self.name, self.driver_memory(), self.usage())) is not None:
            if time.monotonic() >= deadline:
                raise DeviceOccupiedError(why)
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
        """Registers this process in the ledger; the client's memory dies with it.

        `min_bytes` are guaranteed, `limit_bytes` bounds its pages. `shrink_policy` decides which
        clients are asked for memory when this one waits. `background` allows a thread that keeps
        spare pages between their watermarks (`KVCache.set_premapped_pages`); it starts with the
        first low watermark above 0. Without it the client's own calls do that. `guard_holes` is for
        GPUs that run MPS (`Client.guard_holes`); it takes effect before any KV cache.
        Raises NoRoomError if the minimum, or the guard page, is not free, TooManyClientsError,
        DeviceGoneError; on `cuda:N` UnknownDeviceError if there is no such GPU, HiddenDeviceError
        if CUDA_VISIBLE_DEVICES may be why, UnsupportedDeviceError, AlignmentError if page_bytes is
        not the driver's granularity times a power of two, ForkedClientError in the child of a
        process that had used CUDA.
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
        """Bounds the pages of a client of any process, found by name or pid; None lifts the limit.

        It governs the client's next reservation. Below what is held it stops growth and the client
        is asked to shrink to it (`Client.shrink_request`); pages without a live block go within
        0.1 s if the client's thread runs (`KVCache.set_premapped_pages`). `pid` tells clients of
        one name apart, `number` (`ClientUsage.number`) those of one process too. Raises
        UnknownClientError, AmbiguousClientError, InvalidArgumentError below the client's minimum.
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
        """Guarantees pages to a client of any process, found as by `set_limit`.

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
        """Asks clients, found as by `set_limit` (all if nothing is named), to shrink, and waits.

        Each for `size_bytes`, None for all that it can do without, minimum or not. One that does
        not answer within `wait_s` (stopped, or an engine that never looks) says so in its
        `outcome`. Several clients of one name are all asked. Raises UnknownClientError.
        """
        order = self.order_shrink(client, size_bytes, pid=pid, number=number, wait_s=wait_s)
        return order.wait()

    @checked(client=_client, size_bytes=positive, pid=process_id, number=positive, wait_s=patience)
    def order_shrink(
        self,
        client: str | int | None = None,
        size_bytes: int | None = None,
        *,
        pid: int | None = None,
        number: int | None = None,
        wait_s: float = 1.0,
    ) -> ShrinkOrder:
        """`shrink` for event loops: posts the requests and returns; `ShrinkOrder.poll` has
        answers."""
        query = _ClientQuery.of(client, pid, number)

        def wanted(holders: Sequence[Holder]) -> list[Holder]:
            found = [holder for holder in holders if query.matches(holder)]
            if not found and any(part is not None for part in query):
                there = ", ".join(f"{h.name} (pid {h.pid})" for h in holders) or "none"
                raise UnknownClientError(f"no such client; there are: {there}")
            return found

        return order_shrink(self._open_ledger(), wanted, size_bytes, _until_ns(wait_s))

    @checked(missing_bytes=positive, for_client=text, within_s=patience, policy=function)
    def request_room(
        self,
        missing_bytes: int,
        *,
        for_client: str | None = None,
        within_s: float = 1.0,
        policy: ShrinkPolicy = spares_then_idle_caches,
    ) -> None:
        """Asks clients other than those named `for_client` to give back `missing_bytes` together.

        For schedulers that know of a need before an engine meets it. What others were asked for
        already counts as on its way. Returns at once and keeps nothing.
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
        """Removes the ledger; the last one out does this. Closes this object.

        Raises DeviceBusyError while any client lives, unless `force`: then they get DeviceGoneError
        at their next allocation.
        """
        self._open_ledger().destroy(force)
        self._ledger = None

    def close(self) -> None:
        """Detaches this object; clients opened from it stay."""
        self._ledger = None

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    @checked(force=flag)
    def unlink(namespace: str, name: str, *, force: bool = False) -> bool:
        """Removes a device's ledger, of any creator; False if there is none.

        A damaged one, or one of another library version, is removed as well. Raises
        DeviceBusyError while any client lives, or, where that cannot be told, while any process has
        it open, unless `force`.
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
