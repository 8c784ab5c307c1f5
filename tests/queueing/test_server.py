"""The bundled server: password, addresses, restart with its data, end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import redis

from prism.errors import QueueUnavailableError
from prism.queueing import server as server_module
from prism.queueing.server import BundledRedis


@pytest.mark.parametrize("port", [None, 0], ids=["unix", "loopback"])
def test_serves_only_with_its_password(short_dir: Path, port: int | None) -> None:
    with BundledRedis(short_dir, port) as server:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
        without = server.url.replace(f":{server.password}@", "")
        with redis.Redis.from_url(without) as client, pytest.raises(redis.AuthenticationError):
            client.ping()


def test_killed_and_started_again_keeps_its_data(short_dir: Path) -> None:
    with BundledRedis(short_dir) as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("key", "value")
        server.kill()
        server.start()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("key") == b"value"


def test_nothing_is_left_running(short_dir: Path) -> None:
    server = BundledRedis(short_dir)
    server.start()
    pid = server.pid
    assert pid is not None
    server.stop()
    server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not server.socket_path.exists()


def test_password_is_not_in_the_process_list(short_dir: Path) -> None:
    with BundledRedis(short_dir) as server:
        command = Path(f"/proc/{server.pid}/cmdline").read_bytes()
        assert server.password.encode() not in command


def test_port_in_use_shows_the_log(short_dir: Path) -> None:
    (short_dir / "a").mkdir()
    (short_dir / "b").mkdir()
    with BundledRedis(short_dir / "a", 0) as first:
        second = BundledRedis(short_dir / "b", first.port)
        with pytest.raises(QueueUnavailableError, match="in use"):
            second.start()


def test_too_long_a_path_is_refused_by_name(short_dir: Path) -> None:
    with pytest.raises(QueueUnavailableError, match="shorter run directory"):
        BundledRedis(short_dir / ("x" * 120))


def test_a_server_that_ends_before_it_reads_is_named(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings then meet a broken pipe: more of them than a pipe holds, so that they must."""
    monkeypatch.setattr(server_module, "get_binary_path", lambda: "/bin/false")
    server = BundledRedis(short_dir)
    monkeypatch.setattr(server, "_settings", lambda: "x" * (4 << 20))
    with pytest.raises(QueueUnavailableError, match="did not start"):
        server.start()
    assert not server.running


def test_the_log_is_private(short_dir: Path) -> None:
    with BundledRedis(short_dir):
        assert stat.S_IMODE((short_dir / "redis.log").stat().st_mode) == 0o600
