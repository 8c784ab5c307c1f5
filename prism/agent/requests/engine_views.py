"""Views of this device's engines for the local scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcached import ClientUsage, Device
from prism.agent.engines.reclaimer import PeerLedgers
from prism.agent.state.device_state import DeviceState, HostedModel, ModelState
from prism.agent.state.engine_pool import EngineProcess
from prism.agent.state.request_table import EngineLoad
from prism.models.prefill_speed import PRIOR_TOKENS_PER_S
from prism.policies.data import EngineView

# Expected duration of a model's activation before one was measured.
ACTIVATION_PRIOR_S = 2.0
# Expected rest of an activation that already takes longer than expected.
READY_SOON_S = 0.05


@dataclass(frozen=True, slots=True)
class Claim:
    """KV memory that one active engine can use, in its quanta."""

    engine: EngineProcess
    # Idle in its pages or guaranteed to it, minus what its newest requests will take. If negative,
    # they will take the difference (spill_bytes) from the device's free memory.
    own_tokens: int
    spill_bytes: int
    limit_bytes: int | None  # rest of its limit; None: unlimited
    guaranteed_tokens: int  # unused rest of its minimum
    peers_free_bytes: int | None  # least free memory on its other ranks' devices; None: one rank

    @property
    def limit_tokens(self) -> int | None:
        """Tokens that its limit allows in addition to its newest requests; None: unlimited."""
        if self.limit_bytes is None:
            return None
        return self.tokens(self.limit_bytes - self.spill_bytes)

    def tokens(self, size_bytes: int) -> int:
        """Returns the tokens that fit into this size, in whole quanta."""
        activated = self.engine.activated
        assert activated is not None
        return max(0, size_bytes) // activated.quantum_bytes * activated.quantum_tokens


class EngineViews:
    """Source of the views of all engines of the device.

    Memory is read from the ledger at each call. The figure in an engine's status is up to a second
    old, and other engines may have taken memory since.
    """

    def __init__(self, state: DeviceState, device: Device, peers: PeerLedgers) -> None:
        self._state = state
        self._device = device
        self._peers = peers

    def read(self) -> Sequence[EngineView]:
        loads = self._state.requests.loads()
        usage = self._device.usage()
        clients = {client.name: client for client in usage.clients}
        claims = {
            hosted.name: _claim(
                engine,
                clients.get(engine.id),
                loads.get(engine.id, EngineLoad()),
                self._peers.free_bytes(engine),
            )
            for hosted in self._state.models.hosted.values()
            if (engine := self._ready_engine(hosted)) is not None
        }
        free_bytes = usage.free_bytes - sum(claim.spill_bytes for claim in claims.values())
        views = []
        for hosted in self._state.models.hosted.values():
            if claim := claims.get(hosted.name):
                load = loads.get(hosted.engine_id, EngineLoad())
                views.append(self._active_view(hosted, claim, load, free_bytes))
            elif hosted.takes_requests:
                views.append(self._coming_view(hosted))
        return views

    def _ready_engine(self, hosted: HostedModel) -> EngineProcess | None:
        """Returns the model's engine once it has sent a status about the model."""
        engine = self._state.pool.get(hosted.engine_id)
        ready = hosted.state is ModelState.ACTIVE and engine is not None
        return engine if ready and engine is not None and engine.status is not None else None

    def _active_view(
        self, hosted: HostedModel, claim: Claim, load: EngineLoad, free_bytes: int
    ) -> EngineView:
        activated = claim.engine.activated
        assert activated is not None
        speed = self._speed(hosted.name)
        if claim.peers_free_bytes is not None:  # each token is on every rank
            free_bytes = min(free_bytes, claim.peers_free_bytes)
        shared_tokens, limit_tokens = claim.tokens(free_bytes), claim.limit_tokens
        takes_tokens = shared_tokens if limit_tokens is None else min(shared_tokens, limit_tokens)
        return EngineView(
            model=hosted.name,
            available_tokens=max(0, claim.own_tokens) + takes_tokens,
            running=load.running,
            max_running=activated.max_running,
            block_tokens=activated.block_tokens,
            prefill_tokens_per_s=speed,
            pending_prefill_s=load.pending_prompt_tokens / speed,
            shared_tokens=shared_tokens,
            token_bytes=claim.engine.token_bytes,
            quantum_tokens=activated.quantum_tokens,
            guaranteed_tokens=claim.guaranteed_tokens,
            limit_tokens=limit_tokens,
            on_trial=load.on_trial,
            window_tokens=activated.window_tokens,
            window_share=activated.window_share,
            state_tokens=activated.state_tokens,
        )

    def _coming_view(self, hosted: HostedModel) -> EngineView:
        expected_s = hosted.activation_s or ACTIVATION_PRIOR_S
        left_s = expected_s - (self._state.now_s() - hosted.since_s)
        return EngineView(
            model=hosted.name,
            available_tokens=0,
            running=0,
            max_running=0,
            block_tokens=1,
            prefill_tokens_per_s=self._speed(hosted.name),
            ready_in_s=max(READY_SOON_S, left_s),
        )

    def _speed(self, model: str) -> float:
        return self._state.models.totals(model).prefill_tokens_per_s or PRIOR_TOKENS_PER_S


def _claim(
    engine: EngineProcess,
    client: ClientUsage | None,
    load: EngineLoad,
    peers_free_bytes: int | None,
) -> Claim:
    status, activated = engine.status, engine.activated
    assert status is not None
    assert activated is not None
    idle_tokens = status.free_mapped_tokens + status.evictable_tokens
    min_bytes, reserved_bytes, limit_bytes = 0, 0, None
    if client is not None:
        min_bytes, reserved_bytes = client.min_bytes, client.reserved_bytes
        if client.limit_bytes is not None:
            limit_bytes = client.limit_bytes - max(reserved_bytes, min_bytes)

    def tokens(size_bytes: int) -> int:
        return max(0, size_bytes) // activated.quantum_bytes * activated.quantum_tokens

    pending = load.pending_need_tokens
    own_tokens = idle_tokens + tokens(min_bytes - reserved_bytes) - pending
    used_bytes = reserved_bytes - idle_tokens * engine.token_bytes
    spilled_quanta = -(-max(0, -own_tokens) // activated.quantum_tokens)
    return Claim(
        engine,
        own_tokens,
        spilled_quanta * activated.quantum_bytes,
        limit_bytes,
        guaranteed_tokens=max(0, tokens(min_bytes - used_bytes) - pending),
        peers_free_bytes=peers_free_bytes,
    )
