"""Sockets, files and processes of a running cluster: what it opens, writes and leaves."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from prism.config.resolved import read_resolved
from prism.errors import ConfigError
from prism.serve.node import run_dir
from prism.serve.node.run_dir import RunDir, RunDirLostError
from tests.serve.conftest import Cluster, descendants, serving, until
from tests.serve.test_hangs import killed_and_replaced, served
from tests.strangers import give_to_nobody, needs_root

SHM = Path("/dev/shm")


# --- the run directory ---------------------------------------------------------------------------


@pytest.fixture
def temporary(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of this test's new run directories."""
    monkeypatch.setattr("tempfile.tempdir", str(short_dir))
    return short_dir


@needs_root
@pytest.mark.parametrize("option", ["--run-dir", "--log-dir"])
def test_a_directory_of_another_user_is_refused(temporary: Path, option: str) -> None:
    theirs = temporary / "theirs"
    theirs.mkdir()
    give_to_nobody(theirs)
    places = (theirs, None) if option == "--run-dir" else (temporary / "run", theirs)
    with pytest.raises(ConfigError, match=rf"{option}: .* belongs to another user \(uid 65534\);"):
        RunDir.create(*places)
    assert [path.name for path in temporary.rglob("*")] == ["theirs"]


def test_a_link_is_refused(temporary: Path) -> None:
    (temporary / "mine").mkdir()
    (temporary / "link").symlink_to(temporary / "mine")
    with pytest.raises(ConfigError, match=r"--run-dir: .*link is a link; choose another directory"):
        RunDir.create(temporary / "link")
    assert list((temporary / "mine").iterdir()) == []


@needs_root
def test_clusters_of_another_user_are_neither_found_nor_removed(temporary: Path) -> None:
    made = RunDir.create(temporary / "prism-theirs")
    made.config_file.write_text("{}")
    give_to_nobody(made.path)
    assert list(run_dir._candidates()) == []
    with pytest.raises(ConfigError, match=r"--run-dir: .* belongs to another user"):
        run_dir.find(made.path)
    (temporary / "prism-link").symlink_to(made.path)
    run_dir.sweep()
    assert made.config_file.exists()
    made.remove()


@needs_root
def test_a_directory_that_another_user_made_again_ends_the_cluster(
    temporary: Path,
) -> None:
    from tests.serve.test_run_dir import config_for

    made = RunDir.create(temporary / "run")
    config = config_for(made)
    shutil.rmtree(made.path)
    made.path.mkdir()
    give_to_nobody(made.path)
    with pytest.raises(RunDirLostError, match=r"belongs to another user .* the cluster ends"):
        made.repair(config)
    assert list(made.path.iterdir()) == []


# --- what a cluster opens ------------------------------------------------------------------------


def processes(cluster: Cluster) -> Iterator[psutil.Process]:
    for pid in (cluster.process.pid, *descendants(cluster.process.pid)):
        with suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def shared_files(cluster: Cluster) -> list[Path]:
    namespace = read_resolved(cluster.run_dir / "cluster.json").namespace
    found = [path for path in SHM.rglob("*") if namespace in str(path)]
    assert found
    return found


def test_all_that_is_opened_is_this_users_alone(cluster: Cluster) -> None:
    assert cluster.post().status_code == 200
    run_dir, logs = cluster.run_dir, (cluster.run_dir / "logs").resolve()
    paths = [*run_dir.rglob("*"), *logs.rglob("*"), *shared_files(cluster), run_dir, logs]
    found = [path for path in paths if not path.is_symlink()]
    for path in found:
        assert path.stat().st_mode & 0o077 == 0, path
        assert path.stat().st_uid == os.geteuid(), path
    assert any(path.is_socket() for path in found)
    port = httpx.URL(cluster.url).port
    for process in processes(cluster):
        for each in process.net_connections("inet"):
            if each.status == psutil.CONN_LISTEN:
                assert each.laddr == ("127.0.0.1", port)
        for name in (c.laddr for c in process.net_connections("unix") if c.laddr):
            assert str(name).startswith(str(run_dir)), name
        assert process.rlimit(psutil.RLIMIT_CORE)[0] <= 1, process.cmdline()


# --- what is lost or full ------------------------------------------------------------------------


def test_the_run_directory_is_deleted_while_it_serves(tmp_path: Path, short_dir: Path) -> None:
    """Restores sockets, logs and Redis, and new connections find them."""
    with serving(tmp_path, short_dir) as cluster:
        run_dir = cluster.run_dir
        shutil.rmtree(run_dir)
        until(lambda: served(cluster, "a") and served(cluster, "b"), "serving", 120)
        for name in ("prism.agent", "prism.frontend", "prism.cluster"):
            killed_and_replaced(cluster, name, signal.SIGKILL)
        until(lambda: served(cluster, "a") and served(cluster, "b"), "serving", 120)
        until(lambda: cluster.operate("status").returncode == 0, "a status", 120)
        assert run_dir.stat().st_mode & 0o777 == 0o700
    assert not run_dir.exists()
