"""Weight stores in the host memory of the nodes, as in the live system."""

from __future__ import annotations

from collections import OrderedDict
from math import inf

from prism.models.weight_source import weight_source
from prism_sim.core.records import Records
from prism_sim.core.setup import ClusterSetup, ModelSetup


class HostStores:
    """Weight stores of all nodes.

    Every node has all models on its disk, and the most recently used ones in host memory. REQUIRES:
    the setup limits host memory.
    """

    def __init__(self, setup: ClusterSetup, records: Records) -> None:
        self._settings = setup.activation
        self._records = records
        # Node -> model index -> time at which its weights are complete there, least recently used
        # first.
        self._held: dict[str, OrderedDict[int, float]] = {
            device.node: OrderedDict() for device in setup.devices
        }
        self._bytes = {model.index: model.weight_bytes for model in setup.models}

    def fetch(self, model: ModelSetup, node: str, now_s: float, *, at_once: bool = False) -> float:
        """Brings the weights into the node's host memory and returns the time at which they are
        complete. A transfer under way is reused; otherwise `weight_source` selects the source.

        at_once: The transfer takes no time.
        """
        if at_once:
            self.keep(model, node, now_s, now_s)
            return now_s
        here = self._held[node]
        rate = self._settings.network_bytes_s
        others = (name for name in self._held if name != node)
        links = {n: rate for n in others if self._held[n].get(model.index, inf) <= now_s}
        source = weight_source(model.index in here, links, self._settings.disk_bytes_s)
        self._records.count(f"weights_{source.kind}")
        if source.kind == "store":
            here.move_to_end(model.index)
            return max(now_s, here[model.index])
        whole_s = now_s + model.weight_bytes / source.bytes_s
        self.keep(model, node, whole_s, now_s)
        return whole_s

    def keep(self, model: ModelSetup, node: str, whole_s: float, now_s: float) -> None:
        """Stores the weights, and evicts the least recently used ones for them. Does not store them
        if they do not fit, or if the weights to evict are still being transferred."""
        here, most = self._held[node], self._settings.host_store_bytes or 0
        over = sum(self._bytes[index] for index in here) + model.weight_bytes - most
        evicted = []
        for index, ready_s in here.items():
            if over > 0 and ready_s <= now_s:
                evicted.append(index)
                over -= self._bytes[index]
        if over <= 0:
            for index in evicted:
                del here[index]
            here[model.index] = whole_s
