"""Variants of a prism-serve YAML, each served alone on the devices of this machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from prism.config.reader import read_mapping
from prism.errors import ConfigError
from prism.serve.background import BackgroundServer, free_port, serving
from prism_replay.trace import Trace, models_of

Data = dict[str, Any]
MACHINES = ("nodes", "ray")
# Each server has a separate Redis, and one client on this machine.
LEFT_OUT = ("redis", "cluster_key", "access", "policy")
LEFT_OUT_OF_FRONTEND = ("host", "port", "admin", "tls_certificate", "tls_key", "shed")


def read(path: Path, trace: Trace) -> Data:
    """Returns the keys of a YAML that has the models of the trace. Raises ConfigError."""
    try:
        data = read_mapping(path)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    several = next((key for key in MACHINES if data.get(key)), None)
    if several:
        raise ConfigError(
            f"{path}: {several}: measurements are on one machine; give a YAML with `devices` of"
            " this one"
        )
    if any("capacity" not in device for device in data.get("devices") or []):
        raise ConfigError(
            f"{path}: devices[].capacity: measurements need the same memory each time; give a size,"
            " or a part such as 90%"
        )
    known = [str(model["name"]) for model in data.get("models") or []]
    unknown = [name for name in models_of(trace) if name not in known]
    if unknown:
        raise ConfigError(
            f"the trace's models {', '.join(unknown)} are not in {path}, which has"
            f" {', '.join(known)} (`prism-replay convert` renames models)"
        )
    return data


def variant(data: Data, policy: str, models: Sequence[Data]) -> Data:
    """Returns the YAML with another policy and other models."""
    frontend = without(data.get("frontend") or {}, LEFT_OUT_OF_FRONTEND)
    own = {"policy": policy, "models": list(models), "frontend": frontend}
    return {**without(data, LEFT_OUT), **own}


@contextmanager
def served(original: Path, data: Data, logs: Path, name: str) -> Iterator[BackgroundServer]:
    """Runs prism-serve until the block ends. Raises ConfigError or ServeFailedError.

    Args:
        original: The file that `data` is a variant of.
        logs: Folder of the logs.
        name: Part of the run directory's name.
    """
    with yaml_file(original, data) as config, serving(config, free_port(), logs, name) as server:
        yield server


@contextmanager
def yaml_file(original: Path, data: Data) -> Iterator[Path]:
    """Yields a file in the folder of `original`, where the relative paths of `data` start."""
    try:
        number, name = tempfile.mkstemp(".yaml", f".{original.stem}-", original.absolute().parent)
    except OSError as error:
        raise ConfigError(
            f"{original}: a changed YAML cannot be written next to it: {error.strerror}; copy it"
            " to a writable folder"
        ) from error
    try:
        with os.fdopen(number, "w") as file:
            yaml.safe_dump(data, file)
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def without(section: Data, keys: Sequence[str]) -> Data:
    return {key: value for key, value in section.items() if key not in keys}
