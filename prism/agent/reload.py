"""A configuration that was changed while the cluster runs, as an agent takes it over: machines that
came or went. What else a reload changes is not its own concern."""

from __future__ import annotations

import asyncio

from prism.agent.sockets import PeerLinks, SchedulerLink, TokenSender
from prism.config.resolved import LOOK_S, ConfigFile


async def watch(
    file: ConfigFile, scheduler: SchedulerLink, tokens: TokenSender, peers: PeerLinks
) -> None:
    """Until cancelled."""
    while True:
        if (config := file.newer()) is not None:
            scheduler.connect(config)
            tokens.endpoint_of, peers.config = config.frontend_endpoint, config
        await asyncio.sleep(LOOK_S)
