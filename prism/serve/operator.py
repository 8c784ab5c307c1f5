"""Commands of operators to a running cluster's scheduler or launcher."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import zmq

from prism.config.schema.cluster_config import ClusterConfig
from prism.errors import PrismError
from prism.messages.agent import ActionResult
from prism.messages.cluster import OperatorCommand
from prism.messages.troubles import read_troubles
from prism.serve.node.run_dir import DOWN_FILE, REPLACE_FILE
from prism.transport import BlockingChannel

_POLL_S = 0.1
_DOWN_S = 60.0  # in addition to the drain time of open requests


class OperatorError(PrismError):
    """The scheduler did not answer."""


def replace_frontends(config: ClusterConfig, timeout_s: float) -> None:
    """Asks the launcher of `config` to replace the frontends, and waits until it begins. Raises
    OperatorError."""
    request_file, until_s = Path(config.run_dir) / REPLACE_FILE, time.monotonic() + timeout_s
    request_file.touch()
    while request_file.exists():
        if time.monotonic() > until_s:
            request_file.unlink(missing_ok=True)
            raise OperatorError(f"prism-serve did not begin in {timeout_s:g} s; try again")
        time.sleep(_POLL_S)


def down(config: ClusterConfig, *, here: bool) -> None:
    """Ends the `prism-serve` of `config` in order, and waits for it. With Ray ends those of all
    machines, or with `here` only this one, which Ray starts again. Raises OperatorError."""
    from prism.serve.on_ray import cluster_lease  # imports Redis' client

    run_dir, timeout_s = Path(config.run_dir), config.engine.drain_timeout_s + _DOWN_S
    until_s = time.monotonic() + timeout_s
    if here or not config.node or not cluster_lease.stop(config.redis_url, config.cluster_key):
        (run_dir / DOWN_FILE).touch()
    while run_dir.exists():
        if time.monotonic() > until_s:
            raise OperatorError(f"prism-serve did not end in {timeout_s:g} s; see {run_dir}/logs")
        time.sleep(_POLL_S)


def _left_ms(until_s: float) -> int:
    return max(0, round((until_s - time.monotonic()) * 1000))


def ask(config: ClusterConfig, command: OperatorCommand, timeout_s: float) -> ActionResult:
    """Sends `command` to the scheduler of `config`, and returns its answer. Raises OperatorError
    without an answer."""
    with zmq.Context() as context:
        # immediate: of several endpoints, the command goes to one that is connected.
        channel: BlockingChannel[ActionResult] = BlockingChannel(
            context, zmq.DEALER, ActionResult, config.cluster_key, immediate=1
        )
        with closing(channel):
            for endpoint in config.scheduler_endpoints:
                channel.connect(endpoint)
            until_s = time.monotonic() + timeout_s
            if channel.socket.poll(_left_ms(until_s), zmq.POLLOUT):
                channel.send(command, block=False)
                channel.socket.poll(_left_ms(until_s))
            for result in channel.receive(1):
                return result
    troubles = read_troubles(Path(config.run_dir))
    known = "".join(f"; {part}: {trouble}" for part, trouble in troubles.items())
    raise OperatorError(
        f"the scheduler did not answer in {timeout_s:g} s{known};"
        f" see {config.run_dir}/logs/scheduler.log"
    )
