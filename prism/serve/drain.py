"""`prism-serve drain`: waits until devices that get no more models are empty."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from prism.config.schema.cluster_config import ClusterConfig
from prism.errors import ConfigError, PrismError
from prism.messages.cluster import ClusterStatus, OperatorCommand
from prism.serve import operator
from prism.serve.node.run_dir import find

_ASK_S = 10.0
_POLL_S = 0.5


class DrainEndedError(PrismError):
    """The device is in use again, or the cluster has ended."""


def matching_devices(config: ClusterConfig, what: str) -> list[str]:
    """Returns the device `what`, or all devices of a machine for @NODE. Raises ConfigError that
    lists the devices."""
    names = [device.name for device in config.devices]
    found = [name for name in names if name == what or (what[:1] == "@" and name.endswith(what))]
    if not found:
        nodes = "".join(f", @{node.name}" for node in config.nodes)
        raise ConfigError(f"unknown device {what!r}; devices: {', '.join(names)}{nodes}")
    return found


def drain(config: ClusterConfig, devices: Sequence[str], say: Callable[[str], None]) -> None:
    """Drains devices, and returns when no model is on them. Prints changes with `say`. The
    scheduler may restart meanwhile. Raises OperatorError if it refuses or does not answer at first,
    and DrainEndedError."""
    for device in devices:
        ask(config, "drain", device)
    printed = dict.fromkeys(devices, "")
    while (left := _remaining(config, devices)) is None or any(left.values()):
        for device, what in (left or {}).items():
            if what and what != printed[device]:
                say(f"{device}: {what}")
                printed[device] = what
        time.sleep(_POLL_S)


def _remaining(config: ClusterConfig, devices: Sequence[str]) -> dict[str, str] | None:
    """Returns what is still on each device ("": nothing), or None if the scheduler does not know
    yet. Raises DrainEndedError."""
    try:
        status = _status(config)
    except operator.OperatorError:
        _check_cluster_runs(config)
        return None
    left = {device: status.drained[device] for device in devices if device in status.drained}
    if len(left) == len(devices):
        return left
    if status.revision < 0:
        return None
    (gone, *_) = [device for device in devices if device not in left]
    raise DrainEndedError(f"{gone} is not drained any more: another operator has undrained it")


def _check_cluster_runs(config: ClusterConfig) -> None:
    """Raises DrainEndedError if the cluster has ended."""
    try:
        find(Path(config.run_dir))
    except ConfigError as error:
        raise DrainEndedError("the cluster has ended") from error


def ask(config: ClusterConfig, kind: str, device: str) -> None:
    """Sends a command for one device. Raises OperatorError."""
    result = operator.ask(config, OperatorCommand(kind, device=device), _ASK_S)
    if not result.ok:
        raise operator.OperatorError(result.message)


def _status(config: ClusterConfig) -> ClusterStatus:
    result = operator.ask(config, OperatorCommand("status"), _ASK_S)
    return msgspec.json.decode(result.message, type=ClusterStatus)
