"""Reload of a changed configuration in the running scheduler."""

from __future__ import annotations

import asyncio
import logging

from msgspec import structs

from prism.cluster.state.scheduler_state import SchedulerState
from prism.config.reload import changes
from prism.config.resolved import LOOK_S, ConfigFile
from prism.config.schema.cluster_config import ClusterConfig
from prism.queueing.request_queue import RequestQueue
from prism.scheduler.cluster_scheduler import ClusterScheduler

log = logging.getLogger("prism.cluster")


async def watch(file: ConfigFile, state: SchedulerState, scheduler: ClusterScheduler) -> None:
    """Applies each newer configuration, until cancelled."""
    while True:
        if (config := file.newer()) is not None:
            apply_config(state, scheduler, config)
        await asyncio.sleep(LOOK_S)


def apply_config(state: SchedulerState, scheduler: ClusterScheduler, config: ClusterConfig) -> None:
    """Replaces the configuration. State of models and devices that remain is kept."""
    served, wanted = state.served.staying(), state.startup.wanted
    before = structs.replace(state.config, models=served)
    state.served.serve(config)
    state.sizes.add(state.config)
    devices = [device.name for device in config.devices]
    state.book.serve(devices)
    state.demands.drained.intersection_update(devices)
    state.rates.window_s = config.scheduler.rate_window_s
    scheduler.tune(config.scheduler.settings(), config.scheduler.interval_s)
    # New models are activated if they have room, as at the cluster's start.
    wanted |= {model.name for model in config.models} - {model.name for model in served}
    wanted -= state.served.leaving
    log.info("reloaded: %s", "; ".join(changes(before, config)) or "nothing has changed")
    state.changes.notify()


async def confirm(state: SchedulerState, queue: RequestQueue) -> None:
    """Updates `served.revision` to the oldest revision that a frontend uses.

    Once all frontends use the current revision, removed models without open requests are deleted
    from the configuration, and so are evicted. Raises QueueUnavailableError.
    """
    served = state.served
    if served.revision == served.config.revision and not served.leaving:
        return
    frontends = (await queue.frontends()).values()
    revisions = [frontend.revision for frontend in frontends]
    served.revision = min([served.config.revision, *revisions])
    if served.revision < served.config.revision:
        return
    held = {name for frontend in frontends for name in frontend.leaving}
    gone = {name for name in served.leaving - held if not _is_in_use(state, name)}
    if gone:
        log.info("no requests are left for the removed models %s", ", ".join(sorted(gone)))
        served.remove(gone)


def _is_in_use(state: SchedulerState, name: str) -> bool:
    """Returns True if the model has requests or an action in progress."""
    models = state.book.of(name)
    has_requests = state.routes.unplaced.get(name) or any(m.waiting or m.running for _, m in models)
    return bool(has_requests) or name in state.actions.moves
