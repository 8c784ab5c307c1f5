"""Values that a shell completes: models and devices of running clusters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prism.config.reader import read_mapping
from prism.errors import PrismError


def models(incomplete: str) -> list[str]:
    """Returns the models of running clusters, or else of prism.yaml."""
    return _names("models", incomplete)


def devices(incomplete: str) -> list[str]:
    """Returns the devices of running clusters, or else of prism.yaml."""
    return _names("devices", incomplete)


def _names(section: str, incomplete: str) -> list[str]:
    from prism.serve.node.run_dir import running

    found = [each.name for config in running() for each in getattr(config, section)]
    names = dict.fromkeys(found or _of_yaml(section))
    return [name for name in names if name.startswith(incomplete)]


def _of_yaml(section: str) -> Iterator[str]:
    try:
        rows = read_mapping(Path("prism.yaml")).get(section)
    except PrismError:
        return
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and isinstance(row.get("name"), str):
            yield row["name"]
