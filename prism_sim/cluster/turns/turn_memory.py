"""Memory of the devices of an instance, on which models take turns.

It holds the weights and KV of the present model, and the weights of the next model ahead of its
turn. Host memory has a copy of everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prism_sim.cluster.activation import activation_s, home_node
from prism_sim.cluster.device import SimDevice
from prism_sim.core.kernel import Kernel
from prism_sim.core.setup import ClusterSetup, ModelSetup
from prism_sim.engine.memory import Account


class TurnMemory:
    """Memory of one instance: equal devices of a node, each with a part of its models, whose TP
    degree is their number. Weights load at the same rate as under other policies, KV is copied over
    the devices' links.

    switched: Called with the earlier model, the new one, and the name of rank 0's device.
    """

    def __init__(
        self,
        kernel: Kernel,
        setup: ClusterSetup,
        devices: Sequence[SimDevice],
        switched: Callable[[ModelSetup | None, ModelSetup, str], None],
    ) -> None:
        self._kernel = kernel
        self._setup = setup
        self._switched = switched
        self.devices = devices
        # Of rank 0. All ranks hold the same.
        self.device = devices[0]
        self._ledger = self.device.ledger
        self.model: ModelSetup | None = None
        # Model whose weights are prefetched.
        self._next: ModelSetup | None = None
        # Time at which the prefetch is complete.
        self._next_s = 0.0
        self._kv = [Account("kv") for _ in devices]
        for device, account in zip(devices, self._kv, strict=True):
            device.ledger.open(account)

    def load_s(self, model: ModelSetup) -> float:
        """Returns the time to load the model's weights from host memory."""
        settings = self._setup.activation
        where = home_node(model, self._setup)
        ranks = [device.setup for device in self.devices]
        whole_s = activation_s(model, ranks, settings, restarts=False, weights_node=where)
        return max(0.0, whole_s - settings.layout_s)

    def copy_s(self, model: ModelSetup, tokens: float) -> float:
        """Returns the time to copy the KV of `tokens` between devices and host."""
        given = self._setup.activation
        rate = min(given.load_bytes_s * len(self.devices), given.node_load_bytes_s)
        return tokens * model.token_bytes / rate

    def switch_s(self, model: ModelSetup) -> float:
        """Returns the time of a switch to the model without a prefetch."""
        return self._setup.activation.layout_s + self.load_s(model)

    def switch_to(self, model: ModelSetup) -> float:
        """Gives the device to the model. Returns the seconds until it can compute. REQUIRES: no KV
        is held."""
        if model is self.model:
            return 0.0
        now_s, ready_s = self._kernel.time_s, self._next_s
        if model is not self._next:
            ready_s = now_s + self.load_s(model)
            self._close(self._next)
            self._close(self.model)
            self._open(model)
        else:
            self._close(self.model)
        self._switched(self.model, model, self.device.name)
        self.model, self._next = model, None
        return self._setup.activation.layout_s + max(0.0, ready_s - now_s)

    def prefetch(self, model: ModelSetup, kv_bytes: int) -> None:
        """Starts to load the next model's weights if they fit in addition to `kv_bytes` of KV."""
        if model is self._next or model is self.model:
            return
        self.drop_prefetched()
        left_bytes = self._ledger.free_bytes - max(0, kv_bytes - self._kv[0].kv_bytes)
        if self._static_bytes(model) <= left_bytes:
            self._open(model)
            self._next, self._next_s = model, self._kernel.time_s + self.load_s(model)

    def drop_prefetched(self) -> bool:
        """Frees the memory of prefetched weights for KV. Returns False if there are none."""
        dropped, self._next = self._next, None
        self._close(dropped)
        return dropped is not None

    def kv_room_bytes(self) -> int:
        """Returns the maximum size of the present model's KV on each device."""
        return self._kv[0].kv_bytes + self._ledger.free_bytes

    def most_kv_bytes(self, model: ModelSetup) -> int:
        """Returns the memory of each device left for KV by the model's weights alone."""
        return self._ledger.capacity_bytes - self._static_bytes(model)

    def set_kv(self, blocks: int) -> None:
        """Sets the KV of the present model to `blocks`. REQUIRES: they fit."""
        assert self.model is not None
        size_bytes = kv_bytes(self.model, blocks)
        for device, account in zip(self.devices, self._kv, strict=True):
            device.ledger.set_kv(account, size_bytes)

    def _static_bytes(self, model: ModelSetup) -> int:
        return self._ledger.aligned(model.static_bytes(model.tp))

    def _open(self, model: ModelSetup) -> None:
        for device in self.devices:
            device.ledger.open(Account(model.name, self._static_bytes(model)))

    def _close(self, model: ModelSetup | None) -> None:
        if model is not None:
            for device in self.devices:
                device.ledger.close(model.name)


def kv_bytes(model: ModelSetup, blocks: int) -> int:
    """Returns the size of `blocks` on each device, in whole quanta."""
    part = model.parts[model.tp]
    return -(-blocks // part.quantum_blocks) * part.quantum_bytes


def blocks_of(model: ModelSetup, tokens: int) -> int:
    """Returns the number of blocks that `tokens` of one request fill."""
    return model.need.blocks(tokens)
