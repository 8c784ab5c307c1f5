"""The bundled server: password, addresses, restart with its data, end."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import redis

from prism.errors import QueueUnavailableError
from prism.queueing import server as server_module
from prism.queueing.server import BundledRedis
from tests.disks import small_disk


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
    """Writes more settings than a pipe holds, so that the write must meet a broken pipe."""
    monkeypatch.setattr(server_module, "get_binary_path", lambda: "/bin/false")
    server = BundledRedis(short_dir)
    monkeypatch.setattr(server, "_settings", lambda: "x" * (4 << 20))
    with pytest.raises(QueueUnavailableError, match="did not start"):
        server.start()
    assert not server.running


def test_the_log_is_private(short_dir: Path) -> None:
    with BundledRedis(short_dir):
        assert stat.S_IMODE((short_dir / "redis.log").stat().st_mode) == 0o600


# --- data that cannot be loaded -------------------------------------------------------------


def data_of(server: BundledRedis, pattern: str) -> Path:
    [found] = (server.directory / "appendonlydir").glob(pattern)
    return found


def rewrite(pattern: str, change: Callable[[bytes], bytes]) -> Callable[[BundledRedis], None]:
    def damage(server: BundledRedis) -> None:
        path = data_of(server, pattern)
        path.write_bytes(change(path.read_bytes()))

    return damage


def middle(data: bytes, inserted: bytes, lost: int) -> bytes:
    half = len(data) // 2
    return data[:half] + inserted + data[half + lost :]


def no_file(server: BundledRedis) -> None:
    shutil.rmtree(server.directory / "appendonlydir")
    (server.directory / "appendonlydir").write_bytes(b"a file")


def folder_for(pattern: str) -> Callable[[BundledRedis], None]:
    def damage(server: BundledRedis) -> None:
        path = data_of(server, pattern)
        path.unlink()
        path.mkdir()

    return damage


INCR, BASE, MANIFEST = "*.incr.aof", "*.base.rdb", "*.manifest"
UNKNOWN = b"*2\r\n$6\r\nNOSUCH\r\n$6\r\nsecret\r\n"
DAMAGES: dict[str, Callable[[BundledRedis], None]] = {
    "a hole of NULs": rewrite(INCR, lambda data: middle(data, bytes(200), 200)),
    "a gap": rewrite(INCR, lambda data: middle(data, b"", 37)),
    "an absurd length": rewrite(INCR, lambda data: data.replace(b"$50", b"$99999999999999", 1)),
    "an unknown command": rewrite(INCR, lambda data: data + UNKNOWN),
    "no incr": lambda server: data_of(server, INCR).unlink(),
    "a folder as incr": folder_for(INCR),
    "a garbage base": rewrite(BASE, lambda data: Random(1).randbytes(len(data))),
    "a wrong checksum": rewrite(BASE, lambda data: data[:-1] + bytes([data[-1] ^ 255])),
    "half a base": rewrite(BASE, lambda data: data[: len(data) // 2]),
    "no base": lambda server: data_of(server, BASE).unlink(),
    "a garbage manifest": rewrite(MANIFEST, lambda data: Random(1).randbytes(len(data))),
    "an empty manifest": rewrite(MANIFEST, lambda data: b""),
    "a file as folder": no_file,
}
# The server loads the rest, as after any crash.
LOADABLE: dict[str, Callable[[BundledRedis], None]] = {
    "an empty base": rewrite(BASE, lambda data: b""),
    "an empty incr": rewrite(INCR, lambda data: b""),
    "half an incr": rewrite(INCR, lambda data: data[: len(data) // 2]),
    "no manifest": lambda server: data_of(server, MANIFEST).unlink(),
}


@pytest.fixture
def filled(short_dir: Path) -> Iterator[BundledRedis]:
    """Yields a killed server with data in a base file and in an increment."""
    with BundledRedis(short_dir) as server:
        with redis.Redis.from_url(server.url) as client:
            client.mset({f"base{number}": "v" * 50 for number in range(50)})
            client.bgrewriteaof()
            until(lambda: client.info("persistence")["aof_base_size"] > 0)
            client.mset({f"incr{number}": "v" * 50 for number in range(50)})
            client.config_set("appendfsync", "always")
            client.set("last", "v")
        server.kill()
        yield server


def until(condition: Callable[[], object]) -> None:
    until_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def start(server: BundledRedis) -> bool:
    """Returns whether the server came up."""
    server.launch()
    until(lambda: not server.running or server._answers())
    return server.running


def keys(server: BundledRedis) -> int:
    with redis.Redis.from_url(server.url) as client:
        return int(client.dbsize())


@pytest.mark.parametrize("name", DAMAGES)
def test_data_that_cannot_be_loaded_are_put_aside(filled: BundledRedis, name: str) -> None:
    DAMAGES[name](filled)
    assert not start(filled)
    why = filled.load_failure()
    assert why
    assert "secret" not in why
    place = filled.put_aside()
    assert place.exists()
    filled.kill()
    assert start(filled)
    assert keys(filled) == 0
    assert not filled.load_failure()


@pytest.mark.parametrize("name", LOADABLE)
def test_data_that_can_be_loaded_in_part_are(filled: BundledRedis, name: str) -> None:
    LOADABLE[name](filled)
    assert start(filled)
    assert keys(filled) < 101


def test_unreadable_data_are_put_aside(filled: BundledRedis) -> None:
    """Allows for root, which reads the data all the same."""
    data_of(filled, INCR).chmod(0)
    if start(filled):
        assert keys(filled) == 101
        return
    assert "Permission denied" in filled.load_failure()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_bytes_are_damaged_the_server_comes_up(filled: BundledRedis, seed: int) -> None:
    rng = Random(seed)
    path = data_of(filled, (INCR, BASE, MANIFEST)[seed % 3])
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 3, 30))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data)
    if not start(filled):
        assert filled.load_failure()
        filled.put_aside()
        filled.kill()
        assert start(filled)


def test_the_last_damaged_data_are_kept(filled: BundledRedis) -> None:
    places = []
    for _ in range(5):
        places.append(filled.put_aside())
        (filled.directory / "appendonlydir").write_bytes(b"a file")
    assert [place.exists() for place in places] == [False, False, True, True, True]


def wrapped(monkeypatch: pytest.MonkeyPatch, folder: Path, first: str) -> None:
    """Makes servers that start from now on run this line of shell first."""
    path = folder / "wrapper"
    path.write_text(f'#!/bin/sh\n{first}\nexec {server_module.get_binary_path()} "$@"\n')
    path.chmod(0o700)
    monkeypatch.setattr(server_module, "get_binary_path", lambda: path)


def test_what_is_not_the_datas_fault_leaves_them(
    filled: BundledRedis, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Keeps all data after a wrong option, a lack of memory or open files, and a signal."""
    with monkeypatch.context() as patch:
        settings = filled._settings()
        patch.setattr(filled, "_settings", lambda: f"{settings}no-such-option yes\n")
        assert not start(filled)
        assert not filled.load_failure()
    for limit in ("ulimit -v 30000", "ulimit -n 12", "kill -9 $$", "kill -15 $$"):
        with monkeypatch.context() as patch:
            filled.kill()
            wrapped(patch, tmp_path, limit)
            if not start(filled):
                assert not filled.load_failure(), limit
    filled.kill()
    assert start(filled)
    assert keys(filled) == 101
    filled.kill()
    assert not filled.load_failure()


def test_a_port_in_use_leaves_the_data(short_dir: Path) -> None:
    (short_dir / "a").mkdir()
    with BundledRedis(short_dir / "a", 0) as first:
        second = BundledRedis(short_dir, first.port)
        assert not start(second)
        assert not second.load_failure()


def test_too_little_memory_for_whole_data_leaves_them(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with BundledRedis(short_dir) as server:
        with redis.Redis.from_url(server.url) as client:
            for number in range(40):
                client.set(str(number), bytes(4 << 20))
        server.kill()
        with monkeypatch.context() as patch:
            wrapped(patch, tmp_path, f"ulimit -v {100 << 10}")
            assert not start(server)
            assert not server.load_failure()
        server.kill()
        assert start(server)
        assert keys(server) == 40


def test_a_full_disk_leaves_the_data(short_dir: Path, tmp_path: Path) -> None:
    """Puts no folder aside that does not exist yet, either."""
    directory, log = short_dir / "full", tmp_path / "redis.log"
    directory.mkdir()
    log.touch()
    with small_disk(directory, 64 << 10):
        server = BundledRedis(directory)
        (directory / "redis.log").symlink_to(log)
        with (directory / "filler").open("wb", buffering=0) as file:
            until(lambda: not fill(file.fileno()))
        assert not start(server)
        assert "No space left" in log.read_text()
        assert not server.load_failure()


def fill(fd: int) -> bool:
    """Returns whether there was room."""
    try:
        return os.write(fd, bytes(1 << 12)) > 0
    except OSError:
        return False
