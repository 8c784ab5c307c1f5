"""`prism-serve reload`, and SIGHUP: the YAML is read again and the running cluster follows it.

The resolved configuration in the run directory is what all processes follow. Who replaces it by a
newer one has reloaded the cluster; nothing is restarted.
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

from prism.config.endpoints import node_of
from prism.config.reload import changes, reloaded
from prism.config.resolve import load
from prism.config.resolved import write_resolved
from prism.config.schema import ClusterConfig
from prism.errors import ConfigError, PrismError
from prism.frontend.tokenizers import load_tokenizers
from prism.messages.cluster import ClusterStatus, OperatorCommand
from prism.process import child_environment, die_with_parent
from prism.serve import operator
from prism.serve.node import has_told, living
from prism.serve.run_dir import CONFIG_FILE, find

_LOCK_FILE = "reload.lock"
_ASK_S = 10.0
_FOLLOWED_S = 120.0  # frontends load tokenizers of new models
_LOOK_S = 0.2


class NotFollowedError(PrismError):
    """The new configuration is in place, and a process has not taken it over yet."""


def reload(run_dir: Path | None, source: Path | None = None) -> list[str]:
    """Have the cluster follow `source`, or the YAML that it follows now. Returns what changed, when
    all processes have taken it over.

    Raises ConfigError or OperatorError, and nothing has changed; or NotFollowedError.
    """
    with _alone(Path(find(run_dir).run_dir)) as path:
        running = find(path)
        loaded = load(source or Path(running.source), running.variable_keys, running.node)
        status = _status(running)
        wanted = reloaded(running, loaded, status.leaving)
        _check_left(running, wanted, status)
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
        _await_followed(wanted)
        return changed


def _check_left(running: ClusterConfig, wanted: ClusterConfig, status: ClusterStatus) -> None:
    """Nothing runs on machines that are not in the file any more. Raises ConfigError."""
    gone = {node.name for node in running.nodes} - {node.name for node in wanted.nodes}
    placed = {device for each in status.copies.values() for device in each}
    used = placed.union(status.placement.values(), (agent.device for agent in status.agents))
    if still := sorted(gone & ({*map(node_of, used)} | living(running, gone))):
        raise ConfigError(
            f"nodes: {still[0]} is in use; prism-serve drain @{still[0]}, and stop it there, before"
            " you take it out"
        )


@contextmanager
def _alone(path: Path) -> Iterator[Path]:
    """One reload of a cluster at a time. Raises ConfigError."""
    try:
        lock_fd = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--run-dir: {path / _LOCK_FILE} cannot be opened: {error}") from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path
    except BlockingIOError:
        raise ConfigError("another reload is under way; try again when it is done") from None
    finally:
        os.close(lock_fd)


def _status(config: ClusterConfig) -> ClusterStatus:
    result = operator.ask(config, OperatorCommand("status"), _ASK_S)
    return msgspec.json.decode(result.message, type=ClusterStatus)


def _await_followed(config: ClusterConfig) -> None:
    """On several machines: by this one, which does not wait for a reload of the others."""
    until_s = time.monotonic() + _FOLLOWED_S
    if config.nodes and has_told(config, _FOLLOWED_S):
        return
    while not config.nodes and time.monotonic() < until_s:
        with suppress(operator.OperatorError):  # it is being started again
            if _status(config).revision >= config.revision:
                return
        time.sleep(_LOOK_S)
    raise NotFollowedError(
        "the new configuration is in place, but a process has not taken it over in"
        f" {_FOLLOWED_S:.0f} s; prism-serve status shows what is in trouble"
    )


class Reloads:
    """Those that SIGHUP asks for, each in a process of its own: reading models takes a while, and
    the launcher has others to watch."""

    def __init__(self, run_dir: Path, say: Callable[[str], None]) -> None:
        self._run_dir, self._say = run_dir, say
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = False

    def turn(self, asked: bool) -> None:
        """Call a few times a second. What is asked for while one runs begins afterwards."""
        self._asked |= asked
        if self._process is not None and self._process.poll() is not None:
            self._process = None
        if not self._asked or self._process is not None:
            return
        self._asked = False
        command = [sys.executable, "-m", "prism.serve.reload", str(self._run_dir)]
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
