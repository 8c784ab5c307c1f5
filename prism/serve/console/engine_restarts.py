"""Prints engine restarts to the console. Only agents see their engines end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import redis

from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.endpoints import local_name
from prism.messages import MALFORMED_ERRORS
from prism.messages.cluster import ClusterStatus

_POLL_S = 1.0
_TIMEOUT_S = 5.0


@contextmanager
def print_engine_restarts(config: ClusterConfig, say: Callable[[str], None]) -> Iterator[None]:
    """Runs a thread within the block that prints a line whenever a device replaced engines."""
    over = threading.Event()
    thread = threading.Thread(target=_poll_status, args=(config, say, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_TIMEOUT_S)


def _poll_status(config: ClusterConfig, say: Callable[[str], None], over: threading.Event) -> None:
    known: dict[str, tuple[int, int]] = {}
    with redis.Redis.from_url(config.redis_url, socket_timeout=_TIMEOUT_S) as client:
        while not over.wait(_POLL_S):
            try:
                body = client.get(f"{config.namespace}:status")
            except (redis.RedisError, OSError):
                continue  # the supervisor reports it
            if isinstance(body, bytes):
                try:
                    status = msgspec.msgpack.decode(body, type=ClusterStatus)
                except MALFORMED_ERRORS:
                    continue  # the scheduler writes it again
                for line in restart_lines(status, known):
                    say(line)


def restart_lines(status: ClusterStatus, known: dict[str, tuple[int, int]]) -> Iterator[str]:
    """Yields a line for each device that replaced engines since the last call.

    Args:
        status: Present status of the cluster.
        known: Device -> epoch of its agent and number of replaced engines. Updated. A new agent
            counts from 0.
    """
    for agent in status.agents:
        epoch, before = known.get(agent.device, (agent.epoch, 0))
        since = before if epoch == agent.epoch else 0
        known[agent.device] = agent.epoch, agent.engine_restarts_total
        if (ended := agent.engine_restarts_total - since) > 0:
            what = "an engine has" if ended == 1 else f"{ended} engines have"
            log = f"agent-{local_name(agent.device).replace(':', '')}.log"
            yield f"{agent.device}: {what} ended; replacements are starting; see {log}"
