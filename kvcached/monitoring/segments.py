"""Ledger files in shared memory: lists them with their users, and removes unused ones."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import kvcached._core as _core
from kvcached import device as devices
from kvcached.checks import checked, flag, text
from kvcached.errors import LedgerPermissionError, SystemCallError, UnknownDeviceError

_PREFIX = "prism-kvcached."


@dataclass(frozen=True)
class SegmentClient:
    """A client's record in a segment. A dead client's record waits to be reaped."""

    name: str
    pid: int
    alive: bool


@dataclass(frozen=True)
class Segment:
    """One ledger file, read without attaching to it."""

    path: Path
    namespace: str
    device: str
    version: int | None = None
    """Library version of the ledger.

    None, as are the sizes, if the file is not a ledger, is unfinished or of another version.
    """
    capacity_bytes: int | None = None
    page_bytes: int | None = None
    clients: tuple[SegmentClient, ...] = ()
    stale_reason: str | None = None
    """Reason why the file may be removed. None while a process has it open."""
    problem: str | None = None
    """Error that prevented reading the file."""

    @property
    def clients_alive(self) -> int:
        """Number of clients whose process is alive."""
        return sum(client.alive for client in self.clients)

    @property
    def clients_dead(self) -> int:
        """Number of clients whose process is dead."""
        return len(self.clients) - self.clients_alive

    def open(self) -> devices.Device:
        """Attaches to read and administer; unlike `Device.open` this needs no GPU driver.

        Raises UnknownDeviceError if the segment is gone, LedgerVersionError, LedgerCorruptError,
        LedgerPermissionError.
        """
        ledger = _core.Ledger.open(str(self.path), None, None)
        return devices.Device(self.device, self.namespace, ledger)


@checked(namespace=text)
def segments(namespace: str | None = None) -> tuple[Segment, ...]:
    """Returns all ledgers in shared memory, or those of one namespace, by namespace and device.

    Changes nothing. A segment is stale if no process has it open: its processes have ended, in this
    boot or an earlier one and with any library version, or its creator died before finishing it.
    Raises SystemCallError if /dev/shm cannot be listed.
    """
    found = map(_inspect, _paths())
    wanted = (s for s in found if s and namespace in (None, s.namespace))
    return tuple(sorted(wanted, key=lambda s: (s.namespace, s.device)))


@checked(dry_run=flag, namespace=text)
def collect_garbage(dry_run: bool = False, namespace: str | None = None) -> tuple[Segment, ...]:
    """Removes the stale segments and returns them. `dry_run` only returns them.

    Each segment is checked again with openers locked out, so one that came into use stays. Segments
    of other users that may not be removed are left out.
    """
    stale = [segment for segment in segments(namespace) if segment.stale_reason]
    if dry_run:
        return tuple(segment for segment in stale if os.access(segment.path, os.W_OK))
    return tuple(segment for segment in stale if _remove(segment.path))


def _paths() -> list[Path]:
    try:
        return [path for path in devices.SHM_DIR.iterdir() if path.name.startswith(_PREFIX)]
    except OSError as error:
        raise SystemCallError(f"cannot list {devices.SHM_DIR}: {error}") from error


def _inspect(path: Path) -> Segment | None:
    namespace, _, name = path.name.removeprefix(_PREFIX).rpartition(".")
    try:
        report = _core.inspect_segment(str(path))
    except UnknownDeviceError:  # removed meanwhile
        return None
    except (LedgerPermissionError, SystemCallError) as error:
        return Segment(path, namespace, name, problem=str(error))
    return Segment(
        path,
        namespace,
        name,
        version=report.version or None,
        capacity_bytes=report.capacity_bytes or None,
        page_bytes=report.page_bytes or None,
        clients=tuple(SegmentClient(c.name, c.pid, c.alive) for c in report.clients),
        stale_reason=report.stale_reason or None,
    )


def _remove(path: Path) -> bool:
    try:
        return _core.remove_if_stale(str(path))
    except LedgerPermissionError:
        return False
