"""Applies a configuration that was changed while the cluster runs."""

from __future__ import annotations

import asyncio
import logging

from prism.config.resolved import LOOK_S, ConfigFile
from prism.config.schema.cluster_config import ClusterConfig
from prism.frontend.requests.services import Services
from prism.frontend.text.tokenizers import load_tokenizers

RETRY_S = 10.0

log = logging.getLogger(__name__)


async def watch(file: ConfigFile, services: Services) -> None:
    """Applies each newer configuration, until cancelled."""
    while True:
        if (config := file.newer()) is not None:
            await apply_config(services, config)
        await asyncio.sleep(LOOK_S)


async def apply_config(services: Services, config: ClusterConfig) -> None:
    """Loads the new models' tokenizers and applies `config`. Models whose tokenizer cannot be
    loaded are left out until it can be."""
    known = {model.name for model in services.config.models}
    added = [model for model in config.models if model.name not in known]
    unreadable: dict[str, str] = {}
    loaded = await asyncio.to_thread(load_tokenizers, added, unreadable)
    names = {model.name for model in config.models}
    for name in services.unreadable.keys() - names:
        del services.unreadable[name]
    services.unreadable |= unreadable
    kept = {name: one for name, one in services.tokenizers.items() if name in names}
    services.apply_config(config, kept | loaded)
    log.info("the configuration was reloaded (revision %d)", config.revision)


async def retry_unreadable(services: Services) -> None:
    """Retries to load missing tokenizers and chat templates, until cancelled."""
    while True:
        await asyncio.sleep(RETRY_S)
        broken = {name for name, one in services.tokenizers.items() if one.template_error}
        retried = services.unreadable.keys() | broken
        missing = [model for model in services.config.models if model.name in retried]
        still: dict[str, str] = {}
        loaded = await asyncio.to_thread(load_tokenizers, missing, still)
        services.tokenizers |= loaded
        for name in services.unreadable.keys() & {model.name for model in missing}:
            if name in still:
                services.unreadable[name] = still[name]
            else:
                del services.unreadable[name]
