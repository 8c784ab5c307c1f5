"""`prism-serve reload` and SIGHUP: the running cluster takes over a changed YAML.

All processes follow the resolved configuration in the run directory. A reload replaces that file by
a newer one; no process is restarted.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec import structs

from prism.config.reload import changes, reloaded
from prism.config.resolve import load
from prism.config.resolved import write_resolved
from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.endpoints import node_of
from prism.errors import ConfigError, PrismError
from prism.frontend.text.tokenizers import load_tokenizers
from prism.messages.cluster import ClusterStatus, OperatorCommand
from prism.models.hub.hub_model import cached
from prism.process import child_environment, die_with_parent
from prism.serve import operator
from prism.serve.node.registration import running_nodes, wait_published
from prism.serve.node.run_dir import CONFIG_FILE, find

_LOCK_FILE = "reload.lock"
_ASK_S = 10.0
_APPLIED_S = 120.0  # frontends load tokenizers of new models
_POLL_S = 0.2


class NotAppliedError(PrismError):
    """The new configuration is written, but a process has not taken it over yet."""


def reload(run_dir: Path | None, source: Path | None = None) -> list[str]:
    """Replaces the cluster's configuration by `source`, or by the present contents of its YAML.
    Returns the changes when all processes have taken them over.

    Raises ConfigError or OperatorError if nothing has changed, or NotAppliedError.
    """
    with _locked(Path(find(run_dir).run_dir)) as path:
        running = find(path)
        keys, node = running.variable_keys, running.node
        capacities = {device.name: device.capacity_bytes for device in running.devices}
        path_of_yaml = source or Path(running.source)
        loaded = load(path_of_yaml, keys, node, _of_hub(running), capacities)
        status = _status(running)
        wanted = reloaded(running, loaded, status.leaving)
        _check_removed_nodes(running, wanted, status)
        changed = changes(running, wanted)
        if wanted == running:
            return []
        known = {model.name for model in running.models}
        load_tokenizers([model for model in wanted.models if model.name not in known])
        wanted = structs.replace(wanted, revision=running.revision + 1)
        try:
            write_resolved(wanted, path / CONFIG_FILE)
        except OSError as error:
            raise ConfigError(f"--run-dir: {path} cannot be written to: {error}") from error
        _wait_until_applied(wanted)
        return changed


def _of_hub(running: ClusterConfig) -> Callable[[str], Path]:
    """Returns a function for `load`. Models that run keep their folders and those of their
    adapters, also if the cache has newer commits. Nothing is downloaded."""
    models = (*running.models, *running.leaving)
    folders = {name: Path(path) for model in models for name, path in model.hub_paths.items()}
    return lambda name: folders.get(name) or cached(name)


def _check_removed_nodes(
    running: ClusterConfig, wanted: ClusterConfig, status: ClusterStatus
) -> None:
    """Raises ConfigError if a node that is removed from the file is in use."""
    gone = {node.name for node in running.nodes} - {node.name for node in wanted.nodes}
    placed = {device for each in status.copies.values() for device in each}
    used = placed.union(status.placement.values(), (agent.device for agent in status.agents))
    if still := sorted(gone & ({*map(node_of, used)} | running_nodes(running, gone))):
        raise ConfigError(
            f"nodes: {still[0]} is in use; before removing it, run prism-serve drain @{still[0]}"
            " and stop prism-serve there"
        )


@contextmanager
def _locked(path: Path) -> Iterator[Path]:
    """Locks reloads of a cluster within the block. Raises ConfigError during another reload."""
    try:
        lock_fd = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--run-dir: {path / _LOCK_FILE} cannot be opened: {error}") from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path
    except BlockingIOError:
        raise ConfigError("another reload is in progress; try again when it is done") from None
    finally:
        os.close(lock_fd)


def _status(config: ClusterConfig) -> ClusterStatus:
    result = operator.ask(config, OperatorCommand("status"), _ASK_S)
    return msgspec.json.decode(result.message, type=ClusterStatus)


def _wait_until_applied(config: ClusterConfig) -> None:
    """Waits until all processes have taken `config` over. On several machines, waits only for this
    one. Raises NotAppliedError."""
    until_s = time.monotonic() + _APPLIED_S
    if config.nodes and wait_published(config, _APPLIED_S):
        return
    while not config.nodes and time.monotonic() < until_s:
        with suppress(operator.OperatorError):  # the scheduler is being restarted
            if _status(config).revision >= config.revision:
                return
        time.sleep(_POLL_S)
    raise NotAppliedError(
        "the new configuration is written, but a process has not taken it over in"
        f" {_APPLIED_S:.0f} s; prism-serve status shows problems"
    )


class Reloads:
    """Reloads by SIGHUP, each in a separate process: reading models takes long, and the launcher
    must keep watching its children."""

    def __init__(self, run_dir: Path, say: Callable[[str], None]) -> None:
        self._run_dir, self._say = run_dir, say
        self._process: subprocess.Popen[bytes] | None = None
        self._requested = False

    def step(self, requested: bool) -> None:
        """Starts a requested reload. One that is requested during another starts afterwards. Call
        it a few times a second."""
        self._requested |= requested
        if self._process is not None and self._process.poll() is not None:
            self._process = None
        if not self._requested or self._process is not None:
            return
        self._requested = False
        command = [sys.executable, "-m", "prism.serve.reload_command", str(self._run_dir)]
        try:
            self._process = subprocess.Popen(
                command, env=child_environment(), stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            self._say(f"a reload cannot be started: {error}")

    def __enter__(self) -> Reloads:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def main() -> int:
    die_with_parent()
    try:
        changed = reload(Path(sys.argv[1]))
    except PrismError as error:
        print(f"reload: {error}", flush=True)
        return 1
    print(f"reloaded: {summary(changed)}", flush=True)
    return 0


def summary(changed: list[str]) -> str:
    return "; ".join(changed) or "nothing has changed"


if __name__ == "__main__":
    sys.exit(main())
