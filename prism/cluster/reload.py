"""A configuration that was changed while the cluster runs, as the scheduler takes it over."""

from __future__ import annotations

import asyncio
import logging

from msgspec import structs

from prism.cluster.state import SchedulerState
from prism.config.reload import changes
from prism.config.resolved import LOOK_S, ConfigFile
from prism.config.schema import ClusterConfig
from prism.queueing.requests import RequestQueue
from prism.scheduler.cluster import ClusterScheduler

log = logging.getLogger("prism.cluster")


async def watch(file: ConfigFile, state: SchedulerState, scheduler: ClusterScheduler) -> None:
    """Take over each newer configuration, until cancelled."""
    while True:
        if (config := file.newer()) is not None:
            take_over(state, scheduler, config)
        await asyncio.sleep(LOOK_S)


def take_over(state: SchedulerState, scheduler: ClusterScheduler, config: ClusterConfig) -> None:
    served = [model for model in state.config.models if model.name not in state.leaving]
    before = structs.replace(state.config, models=served)
    state.serve(config)
    scheduler.tune(config.scheduler.settings(), config.scheduler.interval_s)
    # As at the start: those come up that have room.
    state.wanted |= {model.name for model in config.models} - {model.name for model in served}
    state.wanted -= state.leaving
    log.info("reloaded: %s", "; ".join(changes(before, config)) or "nothing has changed")
    state.changes.notify()


async def confirm(state: SchedulerState, queue: RequestQueue) -> None:
    """Note who works with which configuration. Once all frontends have this one, and no request for
    a removed model is open, it is unknown here, and so is evicted. Raises QueueUnavailableError."""
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
        log.info("no request is left for %s", ", ".join(sorted(gone)))
        state.leaving -= gone
        kept = [model for model in state.config.models if model.name not in gone]
        state.config = structs.replace(state.config, models=kept)


def _is_in_use(state: SchedulerState, name: str) -> bool:
    """It has requests, or an action under way."""
    models = state.book.of(name)
    has_requests = state.unplaced.get(name) or any(m.waiting or m.running for _, m in models)
    return bool(has_requests) or name in state.moves
