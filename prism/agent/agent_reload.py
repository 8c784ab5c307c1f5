"""Reload of an agent: takes over the machines of a configuration that changed.

Nothing else that a reload changes concerns agents.
"""

from __future__ import annotations

import asyncio

from prism.agent.network.sockets import PeerLinks, SchedulerLink, TokenSender
from prism.config.resolved import LOOK_S, ConfigFile


async def watch(
    file: ConfigFile, scheduler: SchedulerLink, tokens: TokenSender, peers: PeerLinks
) -> None:
    """Applies changes of the configuration file until cancelled."""
    while True:
        if (config := file.newer()) is not None:
            scheduler.connect(config)
            tokens.endpoint_of, peers.config = config.frontend_endpoint, config
        await asyncio.sleep(LOOK_S)
