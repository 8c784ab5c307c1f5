"""Finds the kvcached clients of servers on this machine, and changes their limits.

A server is the process that listens on its URL's port. Its clients are those of this process and of
its descendants, which have the engine. All functions block.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil
from msgspec.structs import replace

import kvcached
from kvcached import KvcachedError
from prism.messages.external import ClientShare
from prism.policies.planning.memory_shares import MemoryShare

_PORTS = {"http": 80, "https": 443}
_LOOK_S = 5.0
# Clusters of Prism divide their devices themselves.
CLUSTER_NAMESPACE = "prism-"
NOT_HERE = "it is on another machine"
NOT_ON_KVCACHED = (
    "no process of it on this machine is a kvcached client of this user; start it with"
    " KVCACHED_DEVICE"
)

DeviceKey = tuple[str, str]  # namespace and device
ClientKey = tuple[str, str, int]  # and the client's number


@dataclass(frozen=True)
class Ledger:
    """One device in use: its administration, and a coherent read."""

    device: kvcached.Device
    usage: kvcached.DeviceUsage


@dataclass(frozen=True)
class Found:
    """Devices in use, and the clients of each server by its URL."""

    ledgers: Mapping[DeviceKey, Ledger]
    clients: Mapping[str, tuple[ClientKey, ...]]
    here: frozenset[str]
    """URLs of servers on this machine."""


class Ledgers:
    """Ledgers of this machine, read again by each `find`. Thread rule: one thread at a time."""

    def __init__(self) -> None:
        self._pids: dict[str, frozenset[int]] = {}  # processes of servers on this machine, by URL
        self._known: frozenset[str] = frozenset()
        self._look_at_s = 0.0

    def find(self, urls: Iterable[str]) -> Found:
        """Returns the devices in use, and the servers' clients on them. Processes are looked for
        every _LOOK_S, and when the URLs change."""
        known, now_s = frozenset(urls), time.monotonic()
        if known != self._known or now_s >= self._look_at_s:
            self._known, self._look_at_s = known, now_s + _LOOK_S
            self._pids = _processes(known)
        ledgers = _read()
        clients: dict[str, tuple[ClientKey, ...]] = {}
        for url in sorted(known):  # two URLs may lead to one server
            taken = {key for keys in clients.values() for key in keys}
            found = _clients_of(self._pids.get(url, frozenset()), ledgers)
            clients[url] = tuple(key for key in found if key not in taken)
        return Found(ledgers, clients, frozenset(self._pids))


def _read() -> dict[DeviceKey, Ledger]:
    found = {}
    for segment in kvcached.segments():
        if segment.capacity_bytes is None or segment.stale_reason is not None:
            continue
        if segment.namespace.startswith(CLUSTER_NAMESPACE):
            continue
        with suppress(KvcachedError):  # it has just gone, or another process keeps it locked
            device = segment.open()  # unlike Device.open, without a GPU's driver
            found[segment.namespace, segment.device] = Ledger(device, device.usage())
    return found


def _clients_of(pids: frozenset[int], ledgers: Mapping[DeviceKey, Ledger]) -> tuple[ClientKey, ...]:
    return tuple(
        (*key, client.number)
        for key, ledger in ledgers.items()
        for client in ledger.usage.clients
        if client.pid in pids
    )


def _processes(urls: Iterable[str]) -> dict[str, frozenset[int]]:
    """Returns the processes that listen on each URL's port, and their descendants, for the URLs of
    this machine."""
    own = {a.address for each in psutil.net_if_addrs().values() for a in each}
    listening: dict[int, set[int]] = {}
    for each in psutil.net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN and each.pid is not None:
            listening.setdefault(getattr(each.laddr, "port", 0), set()).add(each.pid)
    found = {}
    for url in urls:
        parts = urlsplit(url)
        if _is_here(parts.hostname or "", own):
            pids = listening.get(parts.port or _PORTS[parts.scheme], set())
            found[url] = frozenset(pids.union(*map(_descendants, pids)))
    return found


def _is_here(host: str, own: Collection[str]) -> bool:
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return any(a in own or ipaddress.ip_address(a).is_loopback for a in found)


def _descendants(pid: int) -> set[int]:
    try:
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def share_of(
    key: ClientKey, found: Found, before: ClientShare | None, *, taken_over: bool = False
) -> ClientShare:
    """Returns the state of a client, which was `before`.

    Minimum and limit are the operator's if they are not as they were set. If an earlier scheduler
    has set them, `taken_over`, it may have ended before it published them.
    """
    namespace, device, number = key
    usage = found.ledgers[namespace, device].usage
    [client] = [c for c in usage.clients if c.number == number]
    least, most = client.min_bytes, client.limit_bytes
    if before is not None and (before.client, before.pid) == (client.name, client.pid):
        if taken_over or before.min_bytes == least:
            least = before.own_min_bytes
        if taken_over or before.limit_bytes == most:
            most = before.own_limit_bytes
    return ClientShare(
        namespace=namespace,
        device=device,
        client=client.name,
        number=number,
        pid=client.pid,
        held_bytes=client.reserved_bytes,
        evictable_bytes=client.evictable_bytes + client.spare_bytes,
        static_bytes=client.static_bytes,
        min_bytes=client.min_bytes,
        limit_bytes=client.limit_bytes,
        own_min_bytes=least,
        own_limit_bytes=most,
    )


def apply(client: ClientShare, share: MemoryShare | None, found: Found) -> ClientShare:
    """Sets the client's minimum and limit, None: its operator's. Returns its state as it is then.

    What is refused now, such as a minimum that is not free, is tried again in the next round.
    """
    least, most = client.own_min_bytes, client.own_limit_bytes
    if share is not None:
        least, most = share.min_bytes, share.limit_bytes
    if (least, most) == (client.min_bytes, client.limit_bytes):
        return client
    device = found.ledgers[client.namespace, client.device].device
    name, number = client.client, client.number
    with suppress(KvcachedError):
        # In this order the minimum is never above the limit.
        device.set_min(name, min(least, client.min_bytes), number=number)
        device.set_limit(name, most, number=number)
        device.set_min(name, least, number=number)
    with suppress(KvcachedError):
        for now in device.usage().clients:
            if now.number == number:
                return replace(client, min_bytes=now.min_bytes, limit_bytes=now.limit_bytes)
    return client
