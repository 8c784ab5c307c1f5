"""Activations that wait for memory.

An activation reserves weights and KV floor on all its devices before it loads. If they lack memory,
it waits until running requests end, and admission does not use the freed memory.
"""

from __future__ import annotations

from collections.abc import Callable

from prism_sim.cluster.copies import SimModel
from prism_sim.cluster.device import Resident, SimDevice, Stage
from prism_sim.core.kernel import Kernel
from prism_sim.engine.kv import drop_until_free, idle_bytes
from prism_sim.engine.memory import Account

Loaded = Callable[[SimModel, Resident], None]


class ActivationQueue:
    """Queue of activations, oldest first. Each starts to load once its memory is reserved.

    Args:
        loaded: Called with a copy when its load is complete.
        failed: Called with a copy that got no memory before its timeout.
    """

    def __init__(self, kernel: Kernel, loaded: Loaded, failed: Loaded) -> None:
        self._kernel = kernel
        self._loaded = loaded
        self._failed = failed
        self.waiting: list[tuple[SimModel, Resident]] = []
        self._serial = 0

    def add(self, model: SimModel, resident: Resident, timeout_s: float) -> None:
        """Starts to load the copy now, or once its devices have the memory."""
        for device in resident.devices:
            device.pending_bytes += resident.need_bytes(device)
        self.waiting.append((model, resident))
        self._try_load(model, resident)
        if resident.stage is Stage.QUEUED:
            self._kernel.after(timeout_s, self._time_out, model, resident)

    def retry(self) -> None:
        """Retries all activations. Called when memory is freed."""
        for model, resident in list(self.waiting):
            self._try_load(model, resident)

    def _try_load(self, model: SimModel, resident: Resident) -> None:
        devices = resident.devices
        if not _has_room(resident):
            return
        for device in devices:
            device.site.sync()
        if not _has_room(resident):
            return
        self.waiting.remove((model, resident))
        now_s = self._kernel.time_s
        for device in devices:
            drop_until_free(device.site, resident.need_bytes(device))
        load_s = resident.ready_s - resident.since_s + max(0.0, resident.weights_s - now_s)
        resident.load_s = load_s
        resident.stage, resident.ready_s = Stage.LOADING, now_s + load_s
        resident.repaid_s = resident.ready_s + load_s
        for device in devices:
            device.pending_bytes -= resident.need_bytes(device)
            resident.accounts.append(self._open(device, resident))
            if device.ledger.claimed_bytes > device.ledger.free_bytes:
                device.site.end_runs()
        self._kernel.after(load_s, self._loaded, model, resident)

    def _open(self, device: SimDevice, resident: Resident) -> Account:
        self._serial += 1
        setup = resident.model
        static_bytes = device.ledger.aligned(setup.static_bytes(resident.tp))
        name = f"{setup.name}#{self._serial}"
        account = Account(name, static_bytes, 0, resident.floor_bytes, resident.kv_limit_bytes)
        device.ledger.open(account)
        return account

    def _time_out(self, model: SimModel, resident: Resident) -> None:
        """Fails an activation that still waits for memory."""
        if resident.stage is not Stage.QUEUED:
            return
        self.waiting.remove((model, resident))
        for device in resident.devices:
            device.pending_bytes -= resident.need_bytes(device)
        self._failed(model, resident)


def _has_room(resident: Resident) -> bool:
    """Returns whether an activation fits by the present state of the ledgers, which may lack the
    latest steps of runs in flight. False until the copies that it waits for are removed."""
    if any(each in each.home.guests for each in resident.waits_for):
        return False
    return all(
        d.ledger.free_bytes + idle_bytes(d.site) >= resident.need_bytes(d) for d in resident.devices
    )
