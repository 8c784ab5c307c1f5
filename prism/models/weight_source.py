"""Choice of the source from which a machine loads a model's weights, as a pure function for the
live system and the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Source of a model's weights."""

    kind: Literal["store", "peer", "disk"]
    # Machine of the peer.
    node: str = ""
    # Rate of the source in bytes per second; 0 for the machine's own store.
    bytes_s: float = 0.0


def weight_source(held: bool, links: Mapping[str, float], disk_bytes_s: float) -> WeightSource:
    """Returns the fastest source. The machine's own store is preferred to all others, the disk to a
    peer that is not faster, and the first of equally fast peers.

    Args:
        held: True if the machine's own store has the weights.
        links: bytes per second to each other machine whose store has the weights.
    """
    if held:
        return WeightSource("store")
    node = max(links, key=lambda name: links[name], default="")
    if node and links[node] > disk_bytes_s:
        return WeightSource("peer", node, links[node])
    return WeightSource("disk", bytes_s=disk_bytes_s)
