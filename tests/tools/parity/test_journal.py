"""The journal's file: private, bounded, readable after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.parity.journals import read_journals
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig
from prism.errors import ConfigError
from prism.scheduler.decision_journal import (
    FileJournal,
    Full,
    JournalConfig,
    Left,
    Opened,
    journal_path,
    open_journal,
    read,
)


def config(folder: Path, policy: str = "prism") -> ClusterConfig:
    return ClusterConfig(
        namespace="n",
        run_dir=str(folder),
        redis_url="",
        policy=policy,
        devices=[DeviceConfig("host:0", 1 << 20, 1 << 16, 1)],
        models=[],
    )


def test_nothing_is_written_unless_asked_for(tmp_path: Path) -> None:
    assert open_journal(JournalConfig("off"), tmp_path, "cluster", "prism") is None
    assert not list(tmp_path.iterdir())


def test_a_journal_is_private_and_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for _ in range(2):
        journal = open_journal(JournalConfig("inputs"), tmp_path, "host:0", "prism")
        assert journal is not None
        journal.close()
    path = tmp_path / "logs" / "journal-host0.jsonl"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [type(record) for record in read(path)] == [Opened, Opened]


def test_a_full_journal_says_so_and_stops(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "j", True, 100)
    for number in range(20):
        journal.add(Left(time_s=float(number), ids=("r",)))
    records = list(read(tmp_path / "j"))
    assert isinstance(records[-1], Full)
    assert 1 < len(records) < 20


def test_a_folder_that_is_gone_is_no_reason_to_fail(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "none" / "j", True, 100)
    journal.add(Left(time_s=0.0, ids=()))
    journal.close()


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(b'{"what":"left","time_s":1.0,"ids":["a"]}\n{"what":"le')
    assert list(read(path)) == [Left(time_s=1.0, ids=("a",))]


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(b'{"what":"left","time_s":1.0,"ids":[]}\n{"what":"other","time_s":1}\n')
    with pytest.raises(ConfigError, match=r"j:2: not a valid journal record"):
        list(read(path))


def test_journals_of_another_policy_and_incomplete_ones(tmp_path: Path) -> None:
    made = config(tmp_path)
    with pytest.raises(ConfigError, match=r"journal-cluster.jsonl is missing.*keep: inputs"):
        read_journals(tmp_path, made)
    for source in ("cluster", "host:0"):
        FileJournal(journal_path(tmp_path, source), True, 1 << 20).add(
            Opened(time_s=1.0, unix_s=2.0, source=source, policy="static")
        )
    with pytest.raises(ConfigError, match="has policy static; --config has prism"):
        read_journals(tmp_path, made)
    found = read_journals(tmp_path, config(tmp_path, policy="static"))
    assert found.cluster[0].ahead_s == 1.0
    FileJournal(journal_path(tmp_path, "host:0"), True, 1).add(Left(time_s=0.0, ids=()))
    journal_path(tmp_path, "host:0").write_bytes(b"")
    with pytest.raises(ConfigError, match="is not a journal: its first record is not an opening"):
        read_journals(tmp_path, config(tmp_path, policy="static"))
