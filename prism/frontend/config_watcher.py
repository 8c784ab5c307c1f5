"""Applies a configuration that was changed while the cluster runs."""

from __future__ import annotations

import asyncio
import logging

from prism.config.resolved import LOOK_S, ConfigFile
from prism.config.schema.cluster_config import ClusterConfig
from prism.frontend.dispatch.dispatcher import Dispatcher
from prism.frontend.live_config import LiveConfig
from prism.frontend.requests.model_catalog import ModelCatalog

log = logging.getLogger(__name__)


async def watch(
    file: ConfigFile, live: LiveConfig, catalog: ModelCatalog, dispatcher: Dispatcher
) -> None:
    """Applies each newer configuration, until cancelled."""
    while True:
        if (config := file.newer()) is not None:
            await apply_config(config, live, catalog, dispatcher)
        await asyncio.sleep(LOOK_S)


async def apply_config(
    config: ClusterConfig, live: LiveConfig, catalog: ModelCatalog, dispatcher: Dispatcher
) -> None:
    """Applies `config` once the new models' tokenizers are loaded. Open requests continue."""
    await catalog.replace(config.models)
    live.config = config
    dispatcher.apply_config()
    log.info("the configuration was reloaded (revision %d)", config.revision)
