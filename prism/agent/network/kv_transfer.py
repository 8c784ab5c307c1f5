"""Transfer of running requests' KV between this device's agent and those of other machines."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from prism.agent.network.kv_receiver import KvReceiver
from prism.agent.network.kv_sender import KvSender
from prism.agent.network.sockets import PeerLinks
from prism.agent.state.device_state import DeviceState, HostedModel
from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.endpoints import local_name, on_same_machine
from prism.messages.engine import Export
from prism.messages.kv import KvPart, KvTaken
from prism.models.prefill_speed import PRIOR_TOKENS_PER_S
from prism.policies.kv_network import sends_kv

log = logging.getLogger(__name__)


class KvNetwork:
    """Sender and receiver of KV, for one event loop."""

    def __init__(self, config: ClusterConfig, device: str, state: DeviceState) -> None:
        self._device = device
        self._state = state
        self.peers = PeerLinks(config)
        self.sender = KvSender(self.peers, device, state.requests.is_leaving)
        folder = Path(config.local().moves_dir)
        self._receiver = KvReceiver(self.peers, folder, config.device(device).capacity_bytes)
        self.tick = self._receiver.tick

    def export(self, hosted: HostedModel, targets: Sequence[str]) -> Export:
        """Returns the order that makes an engine stop its requests for a move to `targets`.

        KV is kept for targets on this machine. For a target on another machine it is kept if that
        costs less than computing it again; `hosted.kv_target` is then set. KV of several ranks is
        not in one file and cannot be sent.
        """
        if on_same_machine([self._device, *targets]):
            return Export(tuple(map(local_name, targets)))
        if len(targets) > 1 or not self._is_sent(hosted, targets[0]):
            return Export(None)
        hosted.kv_target = targets[0]
        return Export()

    def _is_sent(self, hosted: HostedModel, target: str) -> bool:
        engine = self._state.pool.get(hosted.engine_id)
        speed = self._state.models.totals(hosted.name).prefill_tokens_per_s or PRIOR_TOKENS_PER_S
        try:
            network_bytes_s = self.peers.network_bytes_s(target)
        except ConnectionError as error:
            log.warning("%s", error)
            return False
        sent = engine is not None and sends_kv(engine.token_bytes, speed, network_bytes_s)
        how = "is sent" if sent else "is computed again there, which takes less time"
        log.info("%s moves to %s: its requests' KV %s", hosted.name, target, how)
        return sent

    def take(self, message: KvPart | KvTaken) -> None:
        if isinstance(message, KvPart):
            self._receiver.take(message)
        else:
            self.sender.answered(message)

    async def close(self) -> None:
        await self.sender.close()
        self._receiver.close()
        self.peers.close()
