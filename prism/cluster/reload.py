"""Reload of a changed configuration in the running scheduler."""

from __future__ import annotations

import asyncio
import logging

from msgspec import structs

from prism.cluster.state.scheduler_state import SchedulerState
from prism.config.reload import changes
from prism.config.resolved import LOOK_S, ConfigFile
from prism.config.schema.cluster_config import ClusterConfig
from prism.queueing.requests import RequestQueue
from prism.scheduler.cluster import ClusterScheduler

log = logging.getLogger("prism.cluster")


async def watch(file: ConfigFile, state: SchedulerState, scheduler: ClusterScheduler) -> None:
    """Applies each newer configuration, until cancelled."""
    while True:
        if (config := file.newer()) is not None:
            apply_config(state, scheduler, config)
        await asyncio.sleep(LOOK_S)


def apply_config(state: SchedulerState, scheduler: ClusterScheduler, config: ClusterConfig) -> None:
    served = [model for model in state.config.models if model.name not in state.leaving]
    before = structs.replace(state.config, models=served)
    state.serve(config)
    scheduler.tune(config.scheduler.settings(), config.scheduler.interval_s)
    # New models are activated if they have room, as at the cluster's start.
    state.wanted |= {model.name for model in config.models} - {model.name for model in served}
    state.wanted -= state.leaving
    log.info("reloaded: %s", "; ".join(changes(before, config)) or "nothing has changed")
    state.changes.notify()


async def confirm(state: SchedulerState, queue: RequestQueue) -> None:
    """Updates `state.revision` to the oldest revision that a frontend uses.

    Once all frontends use the current revision, removed models without open requests are deleted
    from the configuration, and so are evicted. Raises QueueUnavailableError.
    """
    if state.revision == state.config.revision and not state.leaving:
        return
    frontends = await queue.frontends()
    revisions = [frontend.revision for frontend in frontends]
    state.revision = min([state.config.revision, *revisions])
    if state.revision < state.config.revision:
        return
    held = {name for frontend in frontends for name in frontend.leaving}
    gone = {name for name in state.leaving - held if not _is_in_use(state, name)}
    if gone:
        log.info("no requests are left for the removed models %s", ", ".join(sorted(gone)))
        state.leaving -= gone
        kept = [model for model in state.config.models if model.name not in gone]
        state.config = structs.replace(state.config, models=kept)


def _is_in_use(state: SchedulerState, name: str) -> bool:
    """Returns True if the model has requests or an action in progress."""
    models = state.book.of(name)
    has_requests = state.unplaced.get(name) or any(m.waiting or m.running for _, m in models)
    return bool(has_requests) or name in state.moves
