"""Ask a running cluster's scheduler to do something, and wait for the outcome."""

from __future__ import annotations

import msgspec
import zmq

from prism.config import ClusterConfig
from prism.errors import PrismError
from prism.messages import ActionResult, OperatorCommand


class OperatorError(PrismError):
    """The scheduler did not answer."""


def ask(config: ClusterConfig, command: OperatorCommand, timeout_s: float) -> ActionResult:
    """Send `command` to the scheduler of `config`. Raises OperatorError when nothing comes back."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.connect(config.scheduler_endpoint)
        socket.send(msgspec.msgpack.encode(command))
        if not socket.poll(round(timeout_s * 1000)):
            raise OperatorError(
                f"the scheduler gave no answer in {timeout_s:g} s; see"
                f" {config.run_dir}/logs/scheduler.log"
            )
        return msgspec.msgpack.decode(socket.recv(), type=ActionResult)
