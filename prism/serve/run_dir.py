"""The directory of one running cluster: sockets, logs, Redis's files, the resolved configuration.

Its mode, 0700, is the lock on all of them. So a directory of another user is never used, nor a
link, which may come to lead elsewhere.

It is locked while its `prism-serve` lives; the kernel drops the lock with the process, so a
directory without a holder was left by one that was killed and may be swept.
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
from kvcached.trust import distrust
from kvcached.weights.store import default_store
from prism.config.resolved import read_resolved, write_resolved
from prism.config.schema import AUTO_STORE, ClusterConfig
from prism.errors import ConfigError, PrismError
from prism.messages import MALFORMED_ERRORS
from prism.serve import mps

log = logging.getLogger(__name__)

PREFIX = "prism-"
CONFIG_FILE = "cluster.json"
REDIS_FOLDER = "redis"
REPLACE_FILE = "replace-frontends"  # an operator makes it; the launcher removes it and begins
DOWN_FILE = "down"  # an operator makes it; the launcher ends
LOCK_FILE = "lock"
# sun_path holds 107 bytes (unix(7)); the longest socket name is a frontend's.
_PATH_BYTES_MAX = 107 - len("/frontend-f15.999999")


class RunDirLostError(PrismError):
    """Sockets and secrets would go where another user reads them."""


class RunDir:
    """Created with mode 0700 and held until `remove`. `path` is absolute and short."""

    def __init__(self, path: Path, lock_fd: int, log_dir: Path | None = None) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self._log_dir = log_dir

    @classmethod
    def create(cls, wanted: Path | None, log_dir: Path | None = None) -> RunDir:
        """A fresh directory: `wanted`, or one below the system's temporary directory.

        `log_dir`: logs go there and survive; else they lie, and end, in the run directory.
        Raises ConfigError when it is too long for sockets, in use, or holds something else.
        """
        path = Path(tempfile.mkdtemp(prefix=PREFIX)) if wanted is None else _prepared(wanted)
        _check_length(path)
        lock_fd = lock(path)
        if lock_fd is None:
            raise ConfigError(f"--run-dir: {path} was taken by another prism-serve; choose another")
        made = cls(path, lock_fd, log_dir)
        try:
            _make_logs(path, log_dir)
        except ConfigError:
            made.remove()
            raise
        return made

    @property
    def config_file(self) -> Path:
        return self.path / CONFIG_FILE

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def repair(self, config: ClusterConfig, *, damaged: bool = False) -> bool:
        """Make again what a cleaner of temporary files removed, or what was damaged (`damaged`: the
        configuration); whether that was anything. Raises OSError or ConfigError, and
        RunDirLostError if another user has made it first."""
        has_config = self.config_file.exists() and not damaged
        whole = has_config and self.logs.is_dir() and self._is_locked()
        if whole:
            return False
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if why := distrust(self.path):
            raise RunDirLostError(f"{self.path} was removed, and {why} now; the cluster ends")
        if not has_config:
            _remove_folder(self.config_file)
            write_resolved(config, self.config_file)
        if not self.logs.is_dir():
            self.logs.unlink(missing_ok=True)  # a link into a folder that is gone, or a file
            _make_logs(self.path, self._log_dir)
        if not self._is_locked():
            _remove_folder(self.path / LOCK_FILE)
            if (lock_fd := lock(self.path)) is not None:
                os.close(self._lock_fd)
                self._lock_fd = lock_fd
        return True

    def _is_locked(self) -> bool:
        """Whether the lock that this process holds is the one that others find."""
        try:
            found = (self.path / LOCK_FILE).stat()
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._lock_fd))

    def remove(self) -> None:
        """The directory and everything in it; then the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def _remove_folder(path: Path) -> None:
    """Removes a folder that is in a file's place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)


def find(wanted: Path | None) -> ClusterConfig:
    """The configuration of a running cluster: the one in `wanted`, or the only one there is.

    Raises ConfigError that lists what runs, or for one of another version.
    """
    if wanted is not None:
        if wanted.exists():
            _check_own(wanted.resolve())
        if not _is_held(wanted):
            raise ConfigError(f"--run-dir: no prism-serve runs in {wanted}; correct the path")
        return _read(wanted)
    found = [_read(path) for path in _candidates() if _is_held(path)]
    if not found:
        raise ConfigError("no running prism-serve was found; start one, or name its --run-dir")
    if len(found) > 1:
        listed = ", ".join(f"{c.run_dir} (port {c.port})" for c in found)
        raise ConfigError(f"several clusters run: {listed}; choose one with --run-dir")
    return found[0]


def running() -> list[ClusterConfig]:
    """This user's clusters, without those of another version."""
    found = []
    for path in _candidates():
        with suppress(ConfigError):
            if _is_held(path):
                found.append(_read(path))
    return found


def sweep() -> None:
    """Remove what killed clusters of this user left: run directories and device ledgers."""
    for path in _candidates():
        lock_fd = lock(path)
        if lock_fd is None:
            continue
        log.info("removing %s, left by a prism-serve that was killed", path)
        _end_cluster(path)
        RunDir(path, lock_fd).remove()


def remove_ledgers(config: ClusterConfig) -> None:
    """After a cluster's processes have ended: the shared-memory segments of its devices, KV that
    was never fetched, and the weight store if it is the cluster's own."""
    config = config.local()
    shutil.rmtree(config.moves_dir, ignore_errors=True)
    if config.engine.weight_store == AUTO_STORE:
        shutil.rmtree(default_store(config.namespace), ignore_errors=True)
    for device in config.devices:
        kvcached.Device.unlink(config.namespace, device.name, force=True)


def _prepared(wanted: Path) -> Path:
    path = wanted.absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_own(path)
        if _is_left_behind(path):
            _end_cluster(path)
            shutil.rmtree(path)
            path.mkdir(mode=0o700)
        content = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise ConfigError(f"--run-dir: cannot use {path}: {error.strerror}") from error
    if content:
        raise ConfigError(f"--run-dir: {path} is in use or not empty; choose another directory")
    path.chmod(0o700)
    return path


def _check_own(path: Path, option: str = "--run-dir") -> None:
    if why := distrust(path):
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
    """A descriptor that holds the directory, or None while another process holds it."""
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
    """Whether a killed prism-serve made the directory, so that it may be removed. Other programs
    may have files called cluster.json."""
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
            f"--run-dir: {file} is not this version's: {error}; choose another directory"
        ) from error


def _candidates() -> Iterator[Path]:
    """Run directories of this user, running or left behind. One whose start was killed early, or
    whose files a cleaner removed, may have no configuration."""
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        try:
            mine = not distrust(path)
            ours = any((path / name).exists() for name in (CONFIG_FILE, REDIS_FOLDER))
            if mine and ours and (path / LOCK_FILE).is_file():
                yield path
        except OSError:
            continue


def _end_cluster(path: Path) -> None:
    """Remove what a killed prism-serve of this directory left outside of it."""
    mps.end_left_behind(path / mps.FOLDER)
    try:
        remove_ledgers(_read(path))
    except (OSError, ConfigError) as error:
        log.warning("%s names no ledgers: %s", path / CONFIG_FILE, error)
