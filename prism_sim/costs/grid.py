"""Files of cost tables: the one in the wheel, and those from calibrations."""

from __future__ import annotations

import gzip
import zlib
from functools import cache
from pathlib import Path

import msgspec

from prism.errors import ConfigError
from prism_sim.costs.table import StepTable

SHIPPED = Path(__file__).parent / "data" / "aiconfigurator.json.gz"
MUXSERVE = SHIPPED.with_name("muxserve.json.gz")
"""Measured steps of MuxServe's engine, for `cost_files`."""


class Grid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tables and their source."""

    # Package, version and license of the source of the measurements.
    package: str = ""
    version: str = ""
    license: str = ""
    tables: tuple[StepTable, ...]


def write_grid(path: Path, grid: Grid) -> None:
    """Writes JSON, compressed if the name ends in .gz. The same grid gives the same bytes. Raises
    ConfigError."""
    content = msgspec.json.encode(grid) + b"\n"
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def read_grid(path: Path) -> Grid:
    """Reads a file of tables. Raises ConfigError that names file and key."""
    try:
        raw = path.read_bytes()
        content = gzip.decompress(raw) if path.suffix == ".gz" else raw
        return msgspec.json.decode(content, type=Grid)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}; docs/costs.md lists the keys") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: is not a file of cost tables: {error}") from error


@cache
def shipped_grid() -> Grid:
    """Returns the tables exported from aiconfigurator-core."""
    return read_grid(SHIPPED)
