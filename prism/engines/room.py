"""Room on the device for a model that comes up: the others shrink first (Prism §5.2)."""

from __future__ import annotations

import kvcached

SHRINK_S = 2.0


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
