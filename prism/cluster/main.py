"""Entry point: reads the resolved configuration, connects the parts, runs until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvloop

from prism.cluster import cluster_reload
from prism.cluster.actuator import Actuator
from prism.cluster.agent_monitor import AgentMonitor
from prism.cluster.controller import ClusterController
from prism.cluster.leader import run_as_leader
from prism.cluster.link import AgentLinks
from prism.cluster.operator_commands import Operator
from prism.cluster.placement_search import PlacementSearch
from prism.cluster.state.scheduler_state import SchedulerState
from prism.cluster.state.timing import SchedulerTiming, timing_of
from prism.config.policy_knobs import live_policy
from prism.config.resolved import LOOK_S, ConfigFile
from prism.config.schema.cluster_config import ClusterConfig
from prism.errors import ConfigError
from prism.process import LoopWatchdog, beat, configure_logging, die_with_parent
from prism.queueing.request_queue import RequestQueue
from prism.scheduler.decision_journal import CLUSTER, open_journal
from prism.tasks import cancel_all

log = logging.getLogger("prism.cluster")


async def run(
    config: ClusterConfig,
    timing: SchedulerTiming,
    stop: asyncio.Event,
    watchdog: LoopWatchdog | None = None,
    file: ConfigFile | None = None,
) -> None:
    """Schedules the cluster until `stop` is set. Models then stay as they are.

    Newer configurations are read from `file`, if given.
    """
    watchdog = watchdog or LoopWatchdog()
    policy = live_policy(config)
    devices, models = len(config.devices), len(config.models)
    log.info("policy %s, %d devices, %d models", policy.name, devices, models)
    journal = open_journal(
        config.journal,
        Path(config.run_dir),
        CLUSTER,
        config.policy,
        settings=config.scheduler.settings(),
    )
    state = SchedulerState(config, policy, timing, time.monotonic, journal)
    queue = RequestQueue.connect(config.redis_url, config.namespace)
    link = AgentLinks(config.own_scheduler_endpoints, config.cluster_key)
    actuator = Actuator(state, link, queue)
    monitor = AgentMonitor(state, link, queue)
    controller = ClusterController(state, queue, monitor, actuator)
    operator = Operator(state, link, actuator)
    # These may wait for long: for reports, and for a search.
    unwatched = [link.run(monitor.on_report, operator.take), _watch_external(state, queue)]
    if policy.search is not None:
        unwatched.append(PlacementSearch(state).run())
    try:
        loops = [controller.watch_arrivals(), controller.watch_traffic(), controller.run()]
        if file is not None:
            loops.append(cluster_reload.watch(file, state, controller.scheduler))
        await _until_stopped(stop, *unwatched, *map(watchdog.watch, loops))
    finally:
        await operator.stop()
        await actuator.stop()
        link.close()
        if journal is not None:
            journal.close()
        await queue.close()


async def _watch_external(state: SchedulerState, queue: RequestQueue) -> None:
    """Manages external servers as soon as there are any, until cancelled. Their modules need httpx,
    which other clusters do without."""
    await state.changes.wait_until(lambda: bool(state.config.external or state.external), None)
    from prism.cluster.external.arbiter import ExternalArbiter
    from prism.cluster.external.sleeper import Sleeper

    sleeper = Sleeper(state, queue)
    arbiter = ExternalArbiter(state, queue, sleeper)
    async with asyncio.TaskGroup() as group:
        for loop in (arbiter.run(), arbiter.watch_health(), sleeper.run()):
            group.create_task(loop)


async def _until_stopped(stop: asyncio.Event, *loops: Coroutine[Any, Any, None]) -> None:
    """Runs the loops until `stop` is set. An error in one of them ends all and is raised."""
    tasks = [asyncio.create_task(loop) for loop in loops]
    stopped = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await cancel_all([stopped, *tasks])


async def _serve(file: ConfigFile) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    watchdog = LoopWatchdog()
    beating = asyncio.create_task(beat(watchdog))
    if file.config.nodes:
        await wait_until_eligible(file, stop)
        await run_as_leader(file.config, stop, lambda over: _run(file, over, watchdog))
    else:
        await _run(file, stop, watchdog)
    beating.cancel()


async def wait_until_eligible(file: ConfigFile, stop: asyncio.Event) -> None:
    """Waits until this node is one of the first, which run schedulers, or `stop` is set.

    A node becomes one of the first when a reload removes another.
    """
    while not file.config.schedules and not stop.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOOK_S)
        file.newer()


async def _run(file: ConfigFile, stop: asyncio.Event, watchdog: LoopWatchdog) -> None:
    file.newer()
    await run(file.config, timing_of(file.config), stop, watchdog, file)


def main(arguments: list[str] | None = None) -> int:
    """Runs the process. Returns 0 after SIGTERM, 2 for an invalid configuration."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m prism.cluster", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the resolved cluster.json")
    options = parser.parse_args(arguments)
    configure_logging()
    try:
        uvloop.run(_serve(ConfigFile(options.config)))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
