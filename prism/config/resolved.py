"""The resolved configuration, as a file of the run directory. Every process reads it, and takes
over a newer one after a reload."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.units import decoded, encoded
from prism.messages import MALFORMED_ERRORS

LOOK_S = 0.5  # interval of checks of the file

log = logging.getLogger(__name__)


def write_resolved(config: ClusterConfig, path: Path) -> None:
    """Writes `config` as JSON, readable by this user only (it may have the Redis password). Readers
    see the whole of the old or of the new file. Raises OSError."""
    partial = path.with_name(f"{path.name}.partial")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(_written(config))
    partial.replace(path)


def _written(config: ClusterConfig) -> bytes:
    return msgspec.json.encode(config, enc_hook=encoded)


def read_resolved(path: Path) -> ClusterConfig:
    """Returns the configuration in a file.

    REQUIRES: `path` was written by `write_resolved` of the same version.
    """
    return _read(path.read_bytes())


def _read(body: bytes) -> ClusterConfig:
    return msgspec.json.decode(body, type=ClusterConfig, dec_hook=read_back)


def read_back(kind: type[Any], value: object) -> Any:
    """Decodes sizes and times, as msgspec's `dec_hook`. Tests write plain numbers, too."""
    return kind(value) if isinstance(value, int | float) else decoded(kind, value)


class ConfigFile:
    """The file, and the configuration that was last read from it."""

    def __init__(self, path: Path, config: ClusterConfig | None = None) -> None:
        """Reads the file if `config` is not given. Raises as `read_resolved`."""
        self.config = config or read_resolved(path)
        self._path = path
        self._seen: tuple[int, int, int] | None = None  # inode, time and size at the last check
        self.damage = ""  # why the existing file does not hold `config`, as of the last check

    def newer(self) -> ClusterConfig | None:
        """Returns the configuration of a reload since the last check. None for a file that was
        removed or damaged, which `prism-serve` writes again."""
        try:
            found = self._path.stat()
            seen = (found.st_ino, found.st_mtime_ns, found.st_size)
            if seen == self._seen:
                return None
            body = self._path.read_bytes()
            config = _read(body)
        except OSError as error:
            self.damage = "" if isinstance(error, FileNotFoundError) else str(error)
            return None
        except MALFORMED_ERRORS as error:
            log.error("%s was not written by this version and is ignored: %s", self._path, error)
            self._seen, self.damage = seen, str(error)
            return None
        self._seen, self.damage = seen, ""
        if config.revision > self.config.revision:
            self.config = config
            return config
        if body != _written(self.config):
            self.damage = "other contents"
        return None
