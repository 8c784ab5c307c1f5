"""`prism-serve drain`: wait until devices that get no more models are empty."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from prism.config.schema import ClusterConfig
from prism.errors import ConfigError, PrismError
from prism.messages.cluster import ClusterStatus, OperatorCommand
from prism.serve import operator
from prism.serve.run_dir import find

_ASK_S = 10.0
_LOOK_S = 0.5


class DrainEndedError(PrismError):
    """The device is in use again, or the cluster has ended."""


def named(config: ClusterConfig, what: str) -> list[str]:
    """A device, or with @NODE all of a machine's. Raises ConfigError that lists what there is."""
    names = [device.name for device in config.devices]
    found = [name for name in names if name == what or (what[:1] == "@" and name.endswith(what))]
    if not found:
        nodes = "".join(f", @{node.name}" for node in config.nodes)
        raise ConfigError(f"there is no device {what!r}; the devices are {', '.join(names)}{nodes}")
    return found


def drain(config: ClusterConfig, devices: Sequence[str], say: Callable[[str], None]) -> None:
    """Returns when no model is on them; `say` hears of each change until then. The scheduler may
    be started again meanwhile. Raises OperatorError where it refuses or does not answer at the
    beginning, and DrainEndedError."""
    for device in devices:
        ask(config, "drain", device)
    said = dict.fromkeys(devices, "")
    while (left := _left(config, devices)) is None or any(left.values()):
        for device, what in (left or {}).items():
            if what and what != said[device]:
                say(f"{device}: {what}")
                said[device] = what
        time.sleep(_LOOK_S)


def _left(config: ClusterConfig, devices: Sequence[str]) -> dict[str, str] | None:
    """What is still on each; "": nothing. None: the scheduler does not know yet. Raises
    DrainEndedError."""
    try:
        status = _status(config)
    except operator.OperatorError:
        _check_runs(config)
        return None
    left = {device: status.drained[device] for device in devices if device in status.drained}
    if len(left) == len(devices):
        return left
    if status.revision < 0:
        return None
    (gone, *_) = [device for device in devices if device not in left]
    raise DrainEndedError(f"{gone} is not drained any more: somebody has undrained it")


def _check_runs(config: ClusterConfig) -> None:
    try:
        find(Path(config.run_dir))
    except ConfigError as error:
        raise DrainEndedError("the cluster has ended") from error


def ask(config: ClusterConfig, kind: str, device: str) -> None:
    """Raises OperatorError."""
    result = operator.ask(config, OperatorCommand(kind, device=device), _ASK_S)
    if not result.ok:
        raise operator.OperatorError(result.message)


def _status(config: ClusterConfig) -> ClusterStatus:
    result = operator.ask(config, OperatorCommand("status"), _ASK_S)
    return msgspec.json.decode(result.message, type=ClusterStatus)
