"""The resolved configuration as a file of the run directory: every process reads it, and takes over
a newer one that a reload puts in its place."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from prism.config.schema import ClusterConfig
from prism.config.units import decoded, encoded

LOOK_S = 0.5  # between two looks at the file

log = logging.getLogger(__name__)


def write_resolved(config: ClusterConfig, path: Path) -> None:
    """Write `config` as JSON, readable by this user only (it may hold the Redis password). Who
    reads it meanwhile reads the whole of the old or of the new one. Raises OSError."""
    partial = path.with_name(f"{path.name}.partial")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(msgspec.json.encode(config, enc_hook=encoded))
    partial.replace(path)


def read_resolved(path: Path) -> ClusterConfig:
    """REQUIRES: `path` was written by `write_resolved` of the same version."""
    return msgspec.json.decode(path.read_bytes(), type=ClusterConfig, dec_hook=_read_back)


def _read_back(kind: type[Any], value: object) -> Any:
    """Tests write plain numbers, too."""
    return kind(value) if isinstance(value, int | float) else decoded(kind, value)


class ConfigFile:
    """The file, and the configuration that was taken from it last."""

    def __init__(self, path: Path, config: ClusterConfig | None = None) -> None:
        """Without `config` it is read. Raises what `read_resolved` raises."""
        self.config = config or read_resolved(path)
        self._path = path
        self._seen: tuple[int, int] | None = None  # of no file: it may have changed since

    def newer(self) -> ClusterConfig | None:
        """The configuration of a reload since the last look. A file that was removed is no news:
        `prism-serve` makes it again."""
        try:
            found = self._path.stat()
            seen = (found.st_ino, found.st_mtime_ns)
            if seen == self._seen:
                return None
            config = read_resolved(self._path)
        except OSError:
            return None
        except msgspec.MsgspecError as error:
            log.error("%s is not this version's, and is left alone: %s", self._path, error)
            config = self.config
        self._seen = seen
        if config.revision <= self.config.revision:
            return None
        self.config = config
        return config
