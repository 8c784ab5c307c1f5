"""Waiting for free memory on a device, for which other engines return spare pages and caches
(Prism §5.2)."""

from __future__ import annotations

import time

import kvcached
from kvcached import NoRoomError
from prism.config.schema.units import format_size

SHRINK_S = 2.0
_POLL_S = 0.005


def await_room(
    device: kvcached.Device, need_bytes: int, wait_s: float, *, only_offered: bool = False
) -> None:
    """Blocks until `need_bytes` are free on the device. Reserves nothing.

    Raises NoRoomError after `wait_s`, or at once with `only_offered` if other engines do not offer
    enough spare pages and cache.
    """
    until_s = time.monotonic() + wait_s
    missing_bytes = need_bytes - device.usage().free_bytes
    if missing_bytes > 0:
        device.request_room(missing_bytes, within_s=wait_s)
    while (free_bytes := device.usage().free_bytes) < need_bytes:
        if time.monotonic() >= until_s or (only_offered and not _is_offered(device, need_bytes)):
            text = f"{format_size(free_bytes)} are free, {format_size(need_bytes)} are needed"
            raise NoRoomError(text, need_bytes, free_bytes)
        time.sleep(_POLL_S)


def make_room(client: kvcached.Client, device: kvcached.Device, need_bytes: int, what: str) -> None:
    """Blocks until `need_bytes` are free for this client, and withholds freed memory from other
    clients meanwhile. They return spare pages and caches.

    Raises NoRoomError after SHRINK_S, or at once if other clients could never return enough.
    `what` names the purpose in the ledger.
    """
    is_possible = need_bytes <= device.capacity_bytes - _fixed_bytes(client, device)
    lease = client.reserve_static(need_bytes, what, wait_s=SHRINK_S if is_possible else 0.0)
    lease.release()


def _fixed_bytes(client: kvcached.Client, device: kvcached.Device) -> int:
    """Returns the bytes that other clients hold while their models are active: static memory and
    guaranteed KV."""
    mine = client.usage()
    all_bytes = sum(c.static_bytes + c.min_bytes for c in device.usage().clients)
    return all_bytes - mine.static_bytes - mine.min_bytes


def _is_offered(device: kvcached.Device, need_bytes: int) -> bool:
    """Returns whether free memory, spare pages and evictable caches are enough."""
    usage = device.usage()
    offered = sum(client.spare_bytes + client.evictable_bytes for client in usage.clients)
    return usage.free_bytes + offered >= need_bytes
