"""Ask a running cluster's scheduler to do something, and wait for the outcome."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import zmq

from prism.config.schema import ClusterConfig
from prism.errors import PrismError
from prism.messages.agent import ActionResult
from prism.messages.cluster import OperatorCommand
from prism.messages.troubles import read_troubles
from prism.serve.on_ray import cluster_lease
from prism.serve.run_dir import DOWN_FILE, REPLACE_FILE
from prism.transport import BlockingChannel

_LOOK_S = 0.1
_DOWN_S = 60.0  # beyond what open requests may take


class OperatorError(PrismError):
    """The scheduler did not answer."""


def replace_frontends(config: ClusterConfig, timeout_s: float) -> None:
    """Ask the launcher of `config`, and wait until it begins. Raises OperatorError."""
    asked, until_s = Path(config.run_dir) / REPLACE_FILE, time.monotonic() + timeout_s
    asked.touch()
    while asked.exists():
        if time.monotonic() > until_s:
            asked.unlink(missing_ok=True)
            raise OperatorError(f"prism-serve did not begin in {timeout_s:g} s; try again")
        time.sleep(_LOOK_S)


def down(config: ClusterConfig, *, here: bool) -> None:
    """End the `prism-serve` of `config` in order, and wait for it: with Ray those of all machines,
    but `here` only this one, which Ray starts again. Raises OperatorError."""
    run_dir, timeout_s = Path(config.run_dir), config.engine.drain_timeout_s + _DOWN_S
    until_s = time.monotonic() + timeout_s
    if here or not config.node or not cluster_lease.stop(config.redis_url, config.cluster_key):
        (run_dir / DOWN_FILE).touch()
    while run_dir.exists():
        if time.monotonic() > until_s:
            raise OperatorError(f"prism-serve did not end in {timeout_s:g} s; see {run_dir}/logs")
        time.sleep(_LOOK_S)


def _left_ms(until_s: float) -> int:
    return max(0, round((until_s - time.monotonic()) * 1000))


def ask(config: ClusterConfig, command: OperatorCommand, timeout_s: float) -> ActionResult:
    """Send `command` to the scheduler of `config`. Raises OperatorError when nothing comes back."""
    with zmq.Context() as context:
        # Immediate: the command goes where a scheduler answers, to one of several places.
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
        f"the scheduler gave no answer in {timeout_s:g} s{known};"
        f" see {config.run_dir}/logs/scheduler.log"
    )
