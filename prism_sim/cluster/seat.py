"""The memory of a device that models take turns on: the weights of one model, those of the next
one ahead of its turn, and KV of the first. All of it also lies in the host's memory."""

from __future__ import annotations

from prism_sim.cluster.activation import activation_s, home_node
from prism_sim.cluster.device import SimDevice
from prism_sim.core.kernel import Kernel
from prism_sim.core.setup import ClusterSetup, ModelSetup
from prism_sim.engine.memory import Account


class Seat:
    """One device. Weights come at the rate at which any policy's do, KV over the device's link."""

    def __init__(self, kernel: Kernel, setup: ClusterSetup, device: SimDevice) -> None:
        self._kernel = kernel
        self._setup = setup
        self._ledger = device.ledger
        self.device = device
        self.model: ModelSetup | None = None
        # Whose weights come ahead, and when they are all there.
        self._ahead: ModelSetup | None = None
        self._ahead_s = 0.0
        self._kv = Account("kv")
        self._ledger.open(self._kv)

    def load_s(self, model: ModelSetup) -> float:
        """Its weights from the host's memory."""
        settings = self._setup.activation
        where = home_node(model, self._setup)
        ranks = [self.device.setup]
        whole_s = activation_s(model, ranks, settings, restarts=False, weights_node=where)
        return max(0.0, whole_s - settings.layout_s)

    def copy_s(self, model: ModelSetup, tokens: int) -> float:
        """KV of so many tokens between device and host."""
        return tokens * model.token_bytes / self._setup.activation.load_bytes_s

    def switch_s(self, model: ModelSetup) -> float:
        """From another model to this one, if nothing was fetched ahead."""
        return self._setup.activation.layout_s + self.load_s(model)

    def take(self, model: ModelSetup) -> float:
        """The model is the device's; returns the seconds until it can compute. REQUIRES: no KV is
        held."""
        if model is self.model:
            return 0.0
        now_s, ready_s = self._kernel.time_s, self._ahead_s
        if model is not self._ahead:
            ready_s = now_s + self.load_s(model)
            self._close(self._ahead)
            self._close(self.model)
            self._open(model)
        else:
            self._close(self.model)
        self.model, self._ahead = model, None
        return self._setup.activation.layout_s + max(0.0, ready_s - now_s)

    def fetch_ahead(self, model: ModelSetup, kv_bytes: int) -> None:
        """Begin to load the next model's weights, if they have room beside `kv_bytes` of KV."""
        if model is self._ahead or model is self.model:
            return
        self.drop_ahead()
        left_bytes = self._ledger.free_bytes - max(0, kv_bytes - self._kv.kv_bytes)
        if self._static_bytes(model) <= left_bytes:
            self._open(model)
            self._ahead, self._ahead_s = model, self._kernel.time_s + self.load_s(model)

    def drop_ahead(self) -> bool:
        """KV needs the memory of weights that were fetched ahead. False: there were none."""
        dropped, self._ahead = self._ahead, None
        self._close(dropped)
        return dropped is not None

    def kv_room_bytes(self) -> int:
        """What its model's KV may take in all."""
        return self._kv.kv_bytes + self._ledger.free_bytes

    def most_kv_bytes(self, model: ModelSetup) -> int:
        """What KV could take beside the model's weights alone."""
        return self._ledger.capacity_bytes - self._static_bytes(model)

    def hold(self, blocks: int) -> None:
        """The KV of the model is so many blocks now. REQUIRES: they fit."""
        assert self.model is not None
        self._ledger.set_kv(self._kv, kv_bytes(self.model, blocks))

    def _static_bytes(self, model: ModelSetup) -> int:
        return self._ledger.aligned(model.static_bytes(1))

    def _open(self, model: ModelSetup) -> None:
        self._ledger.open(Account(model.name, self._static_bytes(model)))

    def _close(self, model: ModelSetup | None) -> None:
        if model is not None:
            self._ledger.close(model.name)


def kv_bytes(model: ModelSetup, blocks: int) -> int:
    """Of so many blocks on the one device, in whole quanta."""
    part = model.parts[1]
    return -(-blocks // part.quantum_blocks) * part.quantum_bytes


def blocks_of(model: ModelSetup, tokens: int) -> int:
    """That so many tokens of one request fill."""
    return -(-tokens // model.block_tokens)
