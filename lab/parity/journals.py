"""Reader of the journals of a cluster's processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from prism.config.schema.cluster_config import ClusterConfig
from prism.errors import ConfigError
from prism.scheduler.decision_journal import CLUSTER, AnyRecord, Full, Opened, journal_path, read


class Dated(NamedTuple):
    """Record with its time on the wall clock."""

    unix_s: float
    ahead_s: float
    """Offset of the wall clock from the record's own clock."""
    record: AnyRecord


@dataclass(frozen=True, slots=True)
class Journals:
    """Records of a cluster's journals, in the order in which each process wrote them."""

    cluster: tuple[Dated, ...]
    agents: dict[str, tuple[Dated, ...]]
    """Device -> its agent's records."""

    def all_agents(self) -> Iterator[tuple[str, Dated]]:
        return ((device, dated) for device, found in self.agents.items() for dated in found)


def read_journals(folder: Path, config: ClusterConfig) -> Journals:
    """Reads the journals of a cluster from its run directory or its log folder.

    Raises ConfigError if a journal is missing, incomplete, or from another cluster.
    """
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
        raise ConfigError(f"{path}: is not a journal: its first record is not an opening")
    if isinstance(records[-1], Full):
        raise ConfigError(f"{path}: is incomplete; increase journal.max in the cluster's YAML")
    policies = {record.policy for record in records if isinstance(record, Opened)}
    if policies != {config.policy}:
        raise ConfigError(
            f"{path}: has policy {', '.join(sorted(policies))}; --config has {config.policy}"
        )
