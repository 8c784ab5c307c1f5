"""Views of the engines on a device for its local scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prism.policies.data import EngineView
from prism_sim.cluster.copies import Resident, Stage
from prism_sim.engine.engine import SimEngine
from prism_sim.engine.kv import returnable_bytes

# Expected rest of an activation that takes longer than expected, as in the live agent.
READY_SOON_S = 0.05


def engine_views(residents: Iterable[Resident], now_s: float) -> Sequence[EngineView]:
    """Returns the views of the copies with requests that wait in the queue or for their prefill."""
    found: list[tuple[Resident, SimEngine | None]] = []
    for resident in residents:
        engine = resident.engine
        if resident.waiting or (engine is not None and engine.prompts.ready):
            found.append((resident, engine))
    for resident, engine in found:
        sync_memory(resident, engine)
    return [
        _activating_view(resident, now_s) if engine is None else engine_view(resident, engine)
        for resident, engine in found
    ]


def sync_memory(resident: Resident, engine: SimEngine | None) -> None:
    """Brings the ledgers of the copy's devices up to the present time."""
    if engine is not None:
        engine.run.catch_up()
    for device in resident.devices:
        if device.gpu.jobs:
            device.site.sync()


def engine_view(resident: Resident, engine: SimEngine) -> EngineView:
    """Returns the view of an engine. REQUIRES: the memory is synced."""
    kv, account = engine.kv, engine.kv.accounts[0]
    quantum_bytes, quantum_tokens, kv_bytes = kv.quantum_bytes, kv.quantum_tokens, kv.kv_bytes
    free_bytes = min([d.room_bytes() for d in resident.devices])
    shared = free_bytes // quantum_bytes * quantum_tokens if free_bytes > 0 else 0
    guaranteed = 0
    if account.min_bytes > kv_bytes:
        guaranteed = (account.min_bytes - kv_bytes) // quantum_bytes * quantum_tokens
    held_blocks = kv.live_blocks
    if idle_blocks := kv.idle_blocks:
        # `shared` already includes the memory of unused cached prefixes, the model's own too.
        freeable_bytes = max([returnable_bytes(kv, d.site) for d in resident.devices])
        held_blocks += freeable_bytes // quantum_bytes * kv.quantum_blocks - idle_blocks
    own = kv.quanta * quantum_tokens - held_blocks * kv.block_tokens + guaranteed
    limit: int | None = None
    if account.limit_bytes is not None:
        left_bytes = account.limit_bytes - max(account.min_bytes, kv_bytes)
        limit = max(0, left_bytes) // quantum_bytes * quantum_tokens
    if engine.prompts.retracted:
        own = shared = guaranteed = 0
    return EngineView(
        resident.model.name,
        own + (shared if limit is None else min(shared, limit)),
        engine.running,
        engine.max_running,
        kv.block_tokens,
        engine.prompts.tokens_per_s,
        engine.prompts.pending_s(),
        0.0 if resident.stage is Stage.ACTIVE else READY_SOON_S,
        shared,
        max(1, quantum_bytes // quantum_tokens),
        quantum_tokens,
        guaranteed,
        limit,
    )


def _activating_view(resident: Resident, now_s: float) -> EngineView:
    left_s = resident.ready_s - now_s
    speed = resident.home.speed_tokens_per_s(resident.model)
    return EngineView(resident.model.name, 0, 0, 0, 1, speed, ready_in_s=max(READY_SOON_S, left_s))
