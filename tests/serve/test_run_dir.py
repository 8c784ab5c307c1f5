"""Run directories: private, locked by the living, swept when left by the killed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from uuid import uuid4

import msgspec
import pytest
from msgspec import structs

import kvcached
from prism.config.resolved import ConfigFile, write_resolved
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig
from prism.errors import ConfigError
from prism.serve.node import run_dir
from prism.serve.node.preflight import check_addresses
from prism.serve.node.run_dir import RunDir


@pytest.fixture
def temporary(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of this test's new run directories."""
    monkeypatch.setattr("tempfile.tempdir", str(short_dir))
    return short_dir


def config_for(made: RunDir, **changes: object) -> ClusterConfig:
    config = ClusterConfig(
        namespace=f"t{uuid4().hex[:8]}",
        run_dir=str(made.path),
        redis_url="",
        policy="prism",
        devices=[DeviceConfig("host:0", 1 << 20, 1 << 16, 1)],
        models=[],
    )
    config = msgspec.structs.replace(config, **changes)
    write_resolved(config, made.config_file)
    return config


def test_it_is_private_and_leaves_nothing(temporary: Path) -> None:
    made = RunDir.create(None)
    assert made.path.parent == temporary
    assert made.path.stat().st_mode & 0o777 == 0o700
    assert made.logs.is_dir()
    made.remove()
    assert list(temporary.iterdir()) == []


def test_logs_can_outlive_it(temporary: Path) -> None:
    made = RunDir.create(temporary / "run", temporary / "logs" / "here")
    (made.logs / "a.log").write_text("kept")
    made.remove()
    assert (temporary / "logs" / "here" / "a.log").read_text() == "kept"


def test_one_in_use_is_refused(temporary: Path) -> None:
    made = RunDir.create(temporary / "run")
    config_for(made)
    with pytest.raises(ConfigError, match="is in use or not empty; choose another directory"):
        RunDir.create(temporary / "run")
    made.remove()


def test_one_with_other_content_is_refused_and_kept(temporary: Path) -> None:
    (temporary / "mine").mkdir()
    (temporary / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"--run-dir: .* not empty"):
        RunDir.create(temporary / "mine")
    assert (temporary / "mine" / "thesis.txt").exists()


@pytest.mark.parametrize("content", [b'{"nodes": 3}', b'{"name": "\xff"}'])
@pytest.mark.parametrize("locked", [False, True])
def test_a_directory_of_somebody_elses_cluster_json_is_kept(
    temporary: Path, locked: bool, content: bytes
) -> None:
    mine = temporary / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("x")
    (mine / "cluster.json").write_bytes(content)
    if locked:
        (mine / "lock").touch()
    with pytest.raises(ConfigError, match=r"--run-dir: .* not empty"):
        RunDir.create(mine)
    assert (mine / "thesis.txt").exists()


def test_the_config_of_another_version_is_an_error_by_name(temporary: Path) -> None:
    made = RunDir.create(None)
    made.config_file.write_text('{"namespace": "x"}')
    for wanted in (None, made.path):
        with pytest.raises(
            ConfigError, match=r"cluster.json was not written by this version: .*run_dir"
        ):
            run_dir.find(wanted)
    # A configuration can still be checked here.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = taken.getsockname()[1]
    other = RunDir.create(None)
    config = config_for(other, host="127.0.0.1", port=used)
    assert [each.port for each in run_dir.running()] == [used]
    (note,) = check_addresses(config)
    assert note.startswith(f"note: port {used} is that of the running cluster {other.path},")
    other.remove()
    made.remove()


def test_a_path_too_long_for_sockets(temporary: Path) -> None:
    with pytest.raises(ConfigError, match="too long for unix sockets"):
        RunDir.create(temporary / ("x" * 100))
    assert list(temporary.iterdir()) == []


def test_find_needs_exactly_one(temporary: Path) -> None:
    with pytest.raises(ConfigError, match="no running prism-serve was found"):
        run_dir.find(None)
    first = RunDir.create(None)
    expected = config_for(first)
    assert run_dir.find(None) == expected
    second = RunDir.create(None)
    config_for(second, port=9)
    with pytest.raises(ConfigError, match=r"several clusters are running: .*\(port 9\).*--run-dir"):
        run_dir.find(None)
    assert run_dir.find(first.path) == expected
    first.remove()
    with pytest.raises(ConfigError, match="no prism-serve is running in"):
        run_dir.find(first.path)
    second.remove()


LEAVE = """
import os, sys
from pathlib import Path
from prism.serve.node.run_dir import RunDir
print(RunDir.create(Path(sys.argv[1])).path, flush=True)
os._exit(9)
"""


def left_behind(path: Path) -> ClusterConfig:
    """Creates what a killed launcher leaves: directory, configuration, device ledger, no lock."""
    subprocess.run([sys.executable, "-c", LEAVE, str(path)], check=False, timeout=60)
    stale = ClusterConfig(
        namespace=f"t{uuid4().hex[:8]}",
        run_dir=str(path),
        redis_url="",
        policy="prism",
        devices=[DeviceConfig("host:0", 1 << 20, 1 << 16, 1)],
        models=[],
    )
    write_resolved(stale, path / run_dir.CONFIG_FILE)
    kvcached.Device.open(
        "host:0", capacity_bytes=1 << 20, page_bytes=1 << 16, namespace=stale.namespace
    )
    return stale


def test_sweep_removes_what_the_killed_left_and_nothing_else(temporary: Path) -> None:
    stale = left_behind(temporary / "prism-stale")
    running = RunDir.create(None)
    config_for(running)
    (temporary / "prism-other").mkdir()
    segment = kvcached.segment_path("host:0", stale.namespace)
    assert segment.exists()
    run_dir.sweep()
    assert not segment.exists()
    assert {p.name for p in temporary.iterdir()} == {running.path.name, "prism-other"}
    running.remove()


def test_a_stale_directory_is_taken_over(temporary: Path) -> None:
    stale = left_behind(temporary / "run")
    made = RunDir.create(temporary / "run")
    assert not made.config_file.exists()
    assert not kvcached.segment_path("host:0", stale.namespace).exists()
    made.remove()


@pytest.mark.parametrize("removed", ["cluster.json", "lock", "logs", ""])
def test_what_a_cleaner_removed_is_made_again(temporary: Path, removed: str) -> None:
    logs = temporary / "logs" if removed == "logs" else None
    made = RunDir.create(temporary / "run", logs)
    config = config_for(made)
    assert not made.repair(config)
    for path in (made.path / removed, *([logs] if logs else [])):
        path.unlink() if path.is_file() or path.is_symlink() else shutil.rmtree(path)
    assert made.repair(config)
    assert not made.repair(config)
    assert run_dir.find(made.path) == config
    assert made.config_file.stat().st_mode & 0o777 == 0o600
    assert made.path.stat().st_mode & 0o777 == 0o700
    (made.logs / "a.log").write_text("can be written")
    run_dir.sweep()
    assert made.config_file.exists(), "its lock still holds it"
    made.remove()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda body: b"",
    "a half": lambda body: body[: len(body) // 2],
    "bytes": lambda body: Random(1).randbytes(len(body)),
    "NULs": lambda body: bytes(len(body)),
    "another one": lambda body: body.replace(b"prism", b"prisn", 1),
    "an empty object": lambda body: b"{}",
    "a deep list": lambda body: b"[" * 100_000,
    "no UTF-8": lambda body: body.replace(b"prism", b"pri\xffm", 1),
    "huge": lambda body: body + b" " * (8 << 20) + b"x",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_configuration_is_written_again(temporary: Path, damage: str) -> None:
    made = RunDir.create(temporary / "run")
    config = config_for(made)
    file = ConfigFile(made.config_file, config)
    assert (file.newer(), file.damage) == (None, "")
    made.config_file.write_bytes(DAMAGES[damage](made.config_file.read_bytes()))
    assert file.newer() is None
    assert file.damage
    assert made.repair(file.config, damaged=True)
    assert (file.newer(), file.damage) == (None, "")
    assert run_dir.find(made.path) == config
    made.remove()


def test_a_reload_is_no_damage(temporary: Path) -> None:
    made = RunDir.create(temporary / "run")
    config = config_for(made)
    file = ConfigFile(made.config_file, config)
    newer = structs.replace(config, revision=config.revision + 1)
    write_resolved(newer, made.config_file)
    assert (file.newer(), file.damage) == (newer, "")
    assert (file.newer(), file.damage) == (None, "")
    write_resolved(config, made.config_file)  # an old one, as from a backup
    assert file.newer() is None
    assert file.damage
    made.remove()


@pytest.mark.parametrize("name", ["cluster.json", "lock"])
def test_a_folder_in_the_place_of_a_file_goes(temporary: Path, name: str) -> None:
    made = RunDir.create(temporary / "run")
    config = config_for(made)
    (made.path / name).unlink()
    (made.path / name / "more").mkdir(parents=True)
    file = ConfigFile(made.config_file, config)
    file.newer()
    assert made.repair(config, damaged=bool(file.damage))
    assert (file.newer(), file.damage) == (None, "")
    assert not made.repair(config)
    assert run_dir.find(made.path) == config
    made.remove()


def test_a_file_in_the_place_of_the_logs_goes(temporary: Path) -> None:
    made = RunDir.create(temporary / "run")
    config = config_for(made)
    made.logs.rmdir()
    made.logs.write_text("junk")
    assert made.repair(config)
    assert made.logs.is_dir()
    made.remove()


def test_redis_data_of_a_killed_cluster_without_its_configuration_is_swept(temporary: Path) -> None:
    left = temporary / "prism-left"
    (left / "redis" / "appendonlydir").mkdir(parents=True)
    (left / "redis" / "appendonlydir" / "appendonly.aof.1.incr.aof").write_text("token ids")
    (left / "lock").touch()
    (temporary / "prism-other").mkdir()
    run_dir.sweep()
    assert [path.name for path in temporary.iterdir()] == ["prism-other"]
