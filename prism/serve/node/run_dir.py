"""The directory of one running cluster: sockets, logs, Redis's files, the resolved configuration.

Its mode, 0700, protects all of them. So a directory of another user is never used, nor a link,
whose target may change.

It is locked while its `prism-serve` runs. The kernel releases the lock when the process ends, so an
unlocked directory was left by a killed process and may be removed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import kvcached
from kvcached.trust import untrusted_reason
from kvcached.weights.store import default_store
from prism.config.resolved import read_resolved, write_resolved
from prism.config.schema.cluster_config import AUTO_STORE, ClusterConfig
from prism.errors import ConfigError, PrismError
from prism.messages import MALFORMED_ERRORS
from prism.serve.node import mps

log = logging.getLogger(__name__)

PREFIX = "prism-"
CONFIG_FILE = "cluster.json"
REDIS_FOLDER = "redis"
REPLACE_FILE = "replace-frontends"  # request of an operator; the launcher removes it
DOWN_FILE = "down"  # request of an operator to end the cluster
LOCK_FILE = "lock"
# sun_path holds 107 bytes (unix(7)); the longest socket name is a frontend's.
_PATH_BYTES_MAX = 107 - len("/frontend-f15.999999")


class RunDirLostError(PrismError):
    """Sockets and secrets would be created where another user can read them."""


class RunDir:
    """Directory of mode 0700, locked until `remove`. `path` is absolute and short."""

    def __init__(self, path: Path, lock_fd: int, log_dir: Path | None = None) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self._log_dir = log_dir

    @classmethod
    def create(cls, wanted: Path | None, log_dir: Path | None = None) -> RunDir:
        """Creates a directory. Raises ConfigError if the path is too long for sockets, in use, or
        not empty.

        Args:
            wanted: The path. None: a new one in the system's temporary directory.
            log_dir: Directory of logs that outlive the cluster. None: below the run directory.
        """
        path = Path(tempfile.mkdtemp(prefix=PREFIX)) if wanted is None else _prepare(wanted)
        _check_length(path)
        lock_fd = lock(path)
        if lock_fd is None:
            raise ConfigError(f"--run-dir: {path} is used by another prism-serve; choose another")
        run_dir = cls(path, lock_fd, log_dir)
        try:
            _make_logs(path, log_dir)
        except ConfigError:
            run_dir.remove()
            raise
        return run_dir

    @property
    def config_file(self) -> Path:
        return self.path / CONFIG_FILE

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def repair(self, config: ClusterConfig, *, damaged: bool = False) -> bool:
        """Restores what a cleaner of temporary files removed, or a `damaged` configuration. Returns
        True if anything was restored. Raises OSError or ConfigError, and RunDirLostError if another
        user has created the directory first."""
        has_config = self.config_file.exists() and not damaged
        whole = has_config and self.logs.is_dir() and self._is_locked()
        if whole:
            return False
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if why := untrusted_reason(self.path):
            raise RunDirLostError(f"{self.path} was removed, and {why} now; the cluster ends")
        if not has_config:
            _remove_folder(self.config_file)
            write_resolved(config, self.config_file)
        if not self.logs.is_dir():
            self.logs.unlink(missing_ok=True)  # a file, or a link to a removed folder
            _make_logs(self.path, self._log_dir)
        if not self._is_locked():
            _remove_folder(self.path / LOCK_FILE)
            if (lock_fd := lock(self.path)) is not None:
                os.close(self._lock_fd)
                self._lock_fd = lock_fd
        return True

    def _is_locked(self) -> bool:
        """Returns True if the lock file in the directory is the one that this process has
        locked."""
        try:
            found = (self.path / LOCK_FILE).stat()
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._lock_fd))

    def remove(self) -> None:
        """Removes the directory and its contents, then releases the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def _remove_folder(path: Path) -> None:
    """Removes a folder in the place of a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)


def find(wanted: Path | None) -> ClusterConfig:
    """Returns the configuration of a running cluster: the one in `wanted`, or the only one. Raises
    ConfigError that lists running clusters, or for a cluster of another version."""
    if wanted is not None:
        if wanted.exists():
            _check_own(wanted.resolve())
        if not _is_held(wanted):
            raise ConfigError(f"--run-dir: no prism-serve is running in {wanted}; correct the path")
        return _read(wanted)
    found = [_read(path) for path in _candidates() if _is_held(path)]
    if not found:
        raise ConfigError("no running prism-serve was found; start one, or give its --run-dir")
    if len(found) > 1:
        listed = ", ".join(f"{c.run_dir} (port {c.port})" for c in found)
        raise ConfigError(f"several clusters are running: {listed}; choose one with --run-dir")
    return found[0]


def running() -> list[ClusterConfig]:
    """Returns this user's running clusters, without those of another version."""
    found = []
    for path in _candidates():
        with suppress(ConfigError):
            if _is_held(path):
                found.append(_read(path))
    return found


def sweep() -> None:
    """Removes what killed clusters of this user left: run directories and device ledgers."""
    for path in _candidates():
        lock_fd = lock(path)
        if lock_fd is None:
            continue
        log.info("removing %s of a killed prism-serve", path)
        _end_cluster(path)
        RunDir(path, lock_fd).remove()


def remove_ledgers(config: ClusterConfig) -> None:
    """Removes what the processes of an ended cluster left: shared-memory segments of its devices,
    KV that was not fetched, and its private weight store."""
    config = config.local()
    shutil.rmtree(config.moves_dir, ignore_errors=True)
    if config.engine.weight_store == AUTO_STORE:
        shutil.rmtree(default_store(config.namespace), ignore_errors=True)
    for device in config.devices:
        kvcached.Device.unlink(config.namespace, device.name, force=True)


def _prepare(wanted: Path) -> Path:
    path = wanted.absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_own(path)
        if _is_left_behind(path):
            _end_cluster(path)
            shutil.rmtree(path)
            path.mkdir(mode=0o700)
        entries = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise ConfigError(f"--run-dir: cannot use {path}: {error.strerror}") from error
    if entries:
        raise ConfigError(f"--run-dir: {path} is in use or not empty; choose another directory")
    path.chmod(0o700)
    return path


def _check_own(path: Path, option: str = "--run-dir") -> None:
    if why := untrusted_reason(path):
        raise ConfigError(f"{option}: {path} {why}; choose another directory")


def _check_length(path: Path) -> None:
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        path.rmdir()
        raise ConfigError(
            f"--run-dir: {path} is too long for unix sockets (over {_PATH_BYTES_MAX} bytes);"
            " choose a shorter one, such as /tmp/prism"
        )


def _make_logs(path: Path, log_dir: Path | None) -> None:
    try:
        if log_dir is None:
            (path / "logs").mkdir()
            return
        log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_own(log_dir.resolve(), "--log-dir")
        (path / "logs").symlink_to(log_dir.absolute())
    except OSError as error:
        raise ConfigError(f"--log-dir: cannot use {log_dir}: {error.strerror}") from error


def lock(path: Path) -> int | None:
    """Returns a descriptor that locks the directory, or None if another process has locked it."""
    lock_fd = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock_fd)
        return None
    return lock_fd


def _is_held(path: Path) -> bool:
    if not (path / LOCK_FILE).is_file() or not (path / CONFIG_FILE).is_file():
        return False
    lock_fd = lock(path)
    if lock_fd is not None:
        os.close(lock_fd)
    return lock_fd is None


def _is_left_behind(path: Path) -> bool:
    """Returns True if a killed prism-serve made the directory, so that it may be removed. Other
    programs may have files called cluster.json."""
    if not (path / LOCK_FILE).is_file() or _is_held(path):
        return False
    try:
        return Path(_read(path).run_dir) == path
    except ConfigError:
        return False


def _read(path: Path) -> ClusterConfig:
    file = path / CONFIG_FILE
    try:
        return read_resolved(file)
    except (OSError, *MALFORMED_ERRORS) as error:
        raise ConfigError(
            f"--run-dir: {file} was not written by this version: {error}; choose another directory"
        ) from error


def _candidates() -> Iterator[Path]:
    """Yields run directories of this user, running or not. A directory whose start was
    killed early, or whose files were removed, may not have a configuration."""
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        try:
            mine = not untrusted_reason(path)
            ours = any((path / name).exists() for name in (CONFIG_FILE, REDIS_FOLDER))
            if mine and ours and (path / LOCK_FILE).is_file():
                yield path
        except OSError:
            continue


def _end_cluster(path: Path) -> None:
    """Removes what a killed prism-serve left outside of this directory."""
    mps.end_left_behind(path / mps.FOLDER)
    try:
        remove_ledgers(_read(path))
    except (OSError, ConfigError) as error:
        log.warning("%s cannot be read, so ledgers are not removed: %s", path / CONFIG_FILE, error)
