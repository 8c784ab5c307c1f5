"""Cached prefixes that nobody uses give their memory to whoever needs it, the oldest first.

They count as used until then. As in the live system an engine gives up its own before others are
asked; those free what they can and keep what lies within their own minimum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prism.sim.kv import KvSpace, MemorySite


def idle_bytes(site: MemorySite, but: KvSpace | None = None) -> int:
    """What the device's ledger would get back of all prefixes that nobody uses."""
    if not site.reuses:
        return 0
    return sum(returnable_bytes(space, site) for space in site.spaces if space is not but)


def make_room(space: KvSpace, blocks: int) -> bool:
    """Drop no more than it takes for `blocks` to fit; nothing where all would not be enough."""
    space.runner.catch_up()
    least_blocks = space.live_blocks - space.idle_blocks + blocks
    least_bytes = space.bytes_of(least_blocks)
    for site, account in zip(space.sites, space.accounts, strict=True):
        most_bytes = max(account.min_bytes, account.kv_bytes) + site.ledger.free_bytes
        most_bytes += idle_bytes(site, space)
        if account.limit_bytes is not None:
            most_bytes = min(most_bytes, account.limit_bytes)
        if least_bytes > most_bytes:
            return False
    while space.idle_blocks and not space.has_room(blocks):
        space.drop_idle()
    for site in space.sites:
        while not space.has_room_on(site, blocks):
            _drop_oldest(site)
    return True


def clear(site: MemorySite, need_bytes: int) -> None:
    """Drop until `need_bytes` are free on the device. REQUIRES: they would be, with all dropped."""
    while site.ledger.free_bytes < need_bytes:
        _drop_oldest(site)


def _drop_oldest(site: MemorySite) -> None:
    giving = [space for space in site.spaces if returnable_bytes(space, site)]
    min(giving, key=lambda space: space.idle_since_s).drop_idle()


def returnable_bytes(space: KvSpace, site: MemorySite) -> int:
    """What the device's ledger would get back of one engine's."""
    if not space.idle_blocks:
        return 0
    space.runner.catch_up()
    floor_bytes = space.accounts[space.sites.index(site)].min_bytes
    left = -(-(space.live_blocks - space.idle_blocks) // space.quantum_blocks)
    left_bytes = max(floor_bytes, left * space.quantum_bytes)
    return max(floor_bytes, space.kv_bytes) - left_bytes
