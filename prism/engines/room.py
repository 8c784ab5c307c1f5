"""Room on a device: other engines give up spare pages and caches first (Prism §5.2)."""

from __future__ import annotations

import time

import kvcached
from kvcached import NoRoomError
from prism.config.units import format_size

SHRINK_S = 2.0
_LOOK_AGAIN_S = 0.005


def await_room(
    device: kvcached.Device, need_bytes: int, wait_s: float, *, only_offered: bool = False
) -> None:
    """Blocks until `need_bytes` are free on the device. Nothing is reserved.

    Raises NoRoomError after `wait_s`, or with `only_offered` at once if others do not offer enough.
    """
    until_s = time.monotonic() + wait_s
    missing_bytes = need_bytes - device.usage().free_bytes
    if missing_bytes > 0:
        device.request_room(missing_bytes, within_s=wait_s)
    while (free_bytes := device.usage().free_bytes) < need_bytes:
        if time.monotonic() >= until_s or (only_offered and not _can_come(device, need_bytes)):
            text = f"{format_size(free_bytes)} are free, {format_size(need_bytes)} are needed"
            raise NoRoomError(text, need_bytes, free_bytes)
        time.sleep(_LOOK_AGAIN_S)


def make_room(client: kvcached.Client, device: kvcached.Device, need_bytes: int, what: str) -> None:
    """Returns when `need_bytes` are free for this client: spare pages and caches of others go
    first, and what comes free is kept from them meanwhile. Raises NoRoomError after SHRINK_S, or
    at once if more is missing than others could ever give.
    """
    can_come = need_bytes <= device.capacity_bytes - _kept_bytes(client, device)
    lease = client.reserve_static(need_bytes, what, wait_s=SHRINK_S if can_come else 0.0)
    lease.release()


def _kept_bytes(client: kvcached.Client, device: kvcached.Device) -> int:
    """What others hold for as long as their models are active: weights, and what is guaranteed."""
    mine = client.usage()
    all_bytes = sum(c.static_bytes + c.min_bytes for c in device.usage().clients)
    return all_bytes - mine.static_bytes - mine.min_bytes


def _can_come(device: kvcached.Device, need_bytes: int) -> bool:
    """Whether others could do without so much."""
    usage = device.usage()
    offered = sum(client.spare_bytes + client.evictable_bytes for client in usage.clients)
    return usage.free_bytes + offered >= need_bytes
