"""Where a machine gets a model's weights from. A pure function, of the live system and the
simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class WeightSource:
    kind: Literal["store", "peer", "disk"]
    # The machine of a peer.
    node: str = ""
    # At which they come; 0 from the own store, which has them.
    bytes_s: float = 0.0


def weight_source(held: bool, links: Mapping[str, float], disk_bytes_s: float) -> WeightSource:
    """held: whether the machine's own store has them. links: of other machines whose stores have
    them, the bytes per second between the two. Of equal ones the first is taken, and the disk
    before a peer that is no faster."""
    if held:
        return WeightSource("store")
    node = max(links, key=lambda name: links[name], default="")
    if node and links[node] > disk_bytes_s:
        return WeightSource("peer", node, links[node])
    return WeightSource("disk", bytes_s=disk_bytes_s)
