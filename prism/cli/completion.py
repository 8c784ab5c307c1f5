"""Values that a shell completes: models and devices of running clusters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from prism.config.reader import read_mapping
from prism.errors import PrismError


def models(incomplete: str) -> list[str]:
    """Returns the models of running clusters, or else of prism.yaml."""
    from prism.serve.node.run_dir import running

    found = [model.name for config in running() for model in config.models]
    return _starting_with(found or _of_yaml("models"), incomplete)


def devices(incomplete: str) -> list[str]:
    """Returns the devices of running clusters, or else of prism.yaml."""
    from prism.serve.node.run_dir import running

    found = [device.name for config in running() for device in config.devices]
    return _starting_with(found or _of_yaml("devices"), incomplete)


def _of_yaml(section: str) -> Iterator[str]:
    try:
        rows = read_mapping(Path("prism.yaml")).get(section)
    except PrismError:
        return
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and isinstance(row.get("name"), str):
            yield row["name"]


def _starting_with(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]
