"""The journals of a cluster's processes, read and dated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from prism.config import ClusterConfig
from prism.errors import ConfigError
from prism.journal import CLUSTER, AnyRecord, Full, Opened, journal_path, read


class Dated(NamedTuple):
    """unix_s: wall clock. ahead_s: the wall clock minus the record's own."""

    unix_s: float
    ahead_s: float
    record: AnyRecord


@dataclass(frozen=True, slots=True)
class Journals:
    """In the order in which each process wrote. agents: device -> its agent's."""

    cluster: tuple[Dated, ...]
    agents: dict[str, tuple[Dated, ...]]

    def all_agents(self) -> Iterator[tuple[str, Dated]]:
        return ((device, dated) for device, found in self.agents.items() for dated in found)


def read_journals(folder: Path, config: ClusterConfig) -> Journals:
    """`folder`: the cluster's run directory or its logs. Raises ConfigError: a journal is missing,
    is not whole, or is of another cluster."""
    if (folder / "logs").is_dir():
        folder = folder / "logs"
    names = [device.name for device in config.devices]
    return Journals(
        _dated(journal_path(folder, CLUSTER), config),
        {name: _dated(journal_path(folder, name), config) for name in names},
    )


def _dated(path: Path, config: ClusterConfig) -> tuple[Dated, ...]:
    if not path.exists():
        raise ConfigError(
            f"--journal: {path} is missing; set journal: {{keep: inputs}} in the cluster's YAML and"
            " start prism-serve with --log-dir"
        )
    records = list(read(path))
    _check(path, records, config)
    found: list[Dated] = []
    ahead_s = 0.0
    for record in records:
        if isinstance(record, Opened):
            ahead_s = record.unix_s - record.time_s
        found.append(Dated(record.time_s + ahead_s, ahead_s, record))
    return tuple(found)


def _check(path: Path, records: Sequence[AnyRecord], config: ClusterConfig) -> None:
    if not records or not isinstance(records[0], Opened):
        raise ConfigError(f"{path}: does not begin as a journal does; is it one?")
    if isinstance(records[-1], Full):
        raise ConfigError(f"{path}: ends early; raise journal.max in the cluster's YAML")
    policies = {record.policy for record in records if isinstance(record, Opened)}
    if policies != {config.policy}:
        raise ConfigError(
            f"{path}: is of policy {', '.join(sorted(policies))}, --config says {config.policy}"
        )
