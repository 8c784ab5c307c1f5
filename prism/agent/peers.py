"""The ledgers of other devices, where the other ranks of this device's engines hold memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvcached import Device
from prism.agent.pool import Engine, Pool


class PeerLedgers:
    """Kept open while the engine lives: as long, no agent replaces the ledger. For one loop."""

    def __init__(self, namespace: str, pool: Pool) -> None:
        self._namespace = namespace
        self._pool = pool
        self._open: dict[str, tuple[Device, ...]] = {}

    def of(self, engine: Engine) -> Sequence[Device]:
        """By rank, from 1 on; empty for an engine on one device. Raises what
        `kvcached.Device.open` raises. REQUIRES: the engine's ranks have started."""
        if not engine.peers:
            return ()
        for gone in [name for name in self._open if self._pool.get(name) is None]:
            del self._open[gone]
        if engine.id not in self._open:
            opened = (Device.open(name, namespace=self._namespace) for name in engine.peers)
            self._open[engine.id] = tuple(opened)
        return self._open[engine.id]

    def free_bytes(self, engine: Engine) -> int | None:
        """The least that is free for it on any of them; None for an engine on one device."""
        return min((device.usage().free_bytes for device in self.of(engine)), default=None)
