"""Several machines: two launchers on separate loopback addresses, with one Redis over TCP."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import psutil
import pytest
import redis
import yaml
from msgspec import structs

from prism.config.resolve import load
from prism.config.schema.cluster_config import EngineConfig
from prism.curve import public_key
from prism.engines.fake import expected_tokens
from prism.errors import ConfigError
from prism.queueing.server import BundledRedis
from prism.serve.node.registration import joined, namespace_of, state_of
from tests.ports import free_port
from tests.serve.clocks import AHEAD_S, shifted_clock
from tests.serve.conftest import (
    SERVE,
    Cluster,
    alive,
    descendants,
    running,
    serve_command,
    until,
    write_yaml,
)

DEVICE = {"name": "host:0", "capacity": "16MiB", "page": "64KiB", "engines": 2}
MODELS = [{"name": n, "path": n, "replicas": {"min": 2, "max": 2}} for n in ("a", "b")]


def write_nodes(
    folder: Path, redis_url: str, each: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """Writes the file of nodes `a` and `b` with free ports, and its key.

    Args:
        each: further settings of both nodes.
    """
    nodes = [
        {"name": name, "address": address, "port": free_port(), "devices": [DEVICE], **(each or {})}
        for name, address in (("a", "127.0.0.1"), ("b", "127.0.0.2"))
    ]
    wanted = {"nodes": nodes, "models": MODELS, "cluster_key": "key", "redis": redis_url, **changes}
    path = write_yaml(folder, **wanted)
    data = yaml.safe_load(path.read_text())
    data.pop("devices")
    path.write_text(yaml.safe_dump(data))
    if not (folder / "key").exists():
        made = [*SERVE, "new-cluster-key", str(folder / "key")]
        subprocess.run(made, check=True, timeout=60)
    return path


class Node(Cluster):
    """Launcher of one node. `run_dir` is that of this machine's part."""


@contextmanager
def node(path: Path, name: str, *options: str, setup: str = "", **variables: str) -> Iterator[Node]:
    """Starts a node without waiting, as a cluster is ready when all nodes are there.

    Args:
        setup: as for `serving`.
    """
    log = path.parent / f"{name}.log"
    with TemporaryDirectory(prefix="prism-") as temporary:
        settings = {"TMPDIR": temporary, "PRISM_FAKE": '{"decode_step_ms": 10}'}
        command = [*serve_command(setup), "--config", str(path), "--node", name, "--port", "0"]
        command += [*options, "--log-dir", str(path.parent / f"{name}-logs")]
        with running(command, log, {**os.environ, **settings, **variables}) as process:
            yield Node(process, Path(temporary), log)


@pytest.fixture(scope="module")
def database() -> Iterator[BundledRedis]:
    with TemporaryDirectory(prefix="prism-") as folder, BundledRedis(Path(folder), port=0) as made:
        yield made


def keys_left(database: BundledRedis) -> list[Any]:
    with redis.Redis.from_url(database.url) as client:
        return list(client.scan_iter("prism-*"))


def status(cluster: Node) -> dict[str, Any]:
    done = cluster.operate("status", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def copies(cluster: Node, model: str) -> set[str]:
    return set(status(cluster).get("copies", {}).get(model, ()))


def answered(cluster: Node, number: int) -> int:
    """Returns the status of an answer and checks the answer's content."""
    prompt = [9, 8, 7 + number % 50]
    answer = cluster.post(
        "ab"[number % 2], prompt=prompt, max_tokens=40, return_token_ids=True, ignore_eos=True
    )
    if answer.status_code == 200:
        assert answer.json()["choices"][0]["token_ids"] == expected_tokens(prompt, 40)
    return answer.status_code


def leader(database: BundledRedis) -> str:
    """Returns the node whose scheduler plans, or an empty string if none does at the moment."""
    with redis.Redis.from_url(database.url, decode_responses=True) as client:
        held = [client.get(key) for key in client.scan_iter("prism-*:lease:scheduler")]
        return str(held[0] or "").partition("-")[0] if held else ""


def check_the_key_is_nowhere(folder: Path, nodes: Iterable[Node]) -> None:
    """Checks that the key is in no argument, environment or log."""
    key = (folder / "key").read_bytes().strip()
    for pid in [pid for each in nodes for pid in (each.process.pid, *each.pids)]:
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            assert key not in Path(f"/proc/{pid}/cmdline").read_bytes()
            assert key not in Path(f"/proc/{pid}/environ").read_bytes()
    logs = [path for path in folder.rglob("*.log") if path.is_file()]
    assert any("agent" in path.name for path in logs)
    assert not [path for path in logs if key in path.read_bytes()]


def check_what_listens(cluster: Node) -> None:
    """Checks that only the API and sockets that require a CURVE key listen on TCP."""
    found = set[tuple[str, int]]()
    for pid in (cluster.process.pid, *cluster.pids):
        with suppress(psutil.NoSuchProcess):
            opened = psutil.Process(pid).net_connections("tcp")
            found |= {
                (each.laddr[0], each.laddr[1])
                for each in opened
                if each.status == psutil.CONN_LISTEN
            }
    api = urlsplit(cluster.url)
    keyed = found - {(api.hostname, api.port)}
    assert len(keyed) >= 2, "an agent, a frontend; a scheduler that waits has none"
    assert {mechanism(address) for address in keyed} == {b"CURVE"}


def mechanism(address: tuple[str, int]) -> bytes:
    """Returns the mechanism that a ZeroMQ socket requires in its greeting (ZMTP 3.0).

    Empty if the mechanism is not ours, as the socket then ends the connection.
    """
    mine = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0")
    with socket.create_connection(address, 10) as peer, peer.makefile("rb") as answer:
        peer.sendall(mine.ljust(64, b"\0"))
        return answer.read(64)[12:32].rstrip(b"\0")


def check_no_clock_was_compared(
    cluster: Node, ages: tuple[str, ...] = ("prism_status_age_seconds", "prism_queue_seconds_sum")
) -> None:
    """Checks ages of other machines' reports, and waits, as far as a cluster shows them."""
    assert httpx.get(f"{cluster.url}/health").json() == {"status": "ready"}
    for line in httpx.get(f"{cluster.url}/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        assert not name.startswith(ages) or 0 < float(value) < AHEAD_S / 2, line


def test_two_nodes(tmp_path: Path, database: BundledRedis) -> None:
    """Serves all models on both nodes, whose clocks are minutes apart.

    The node that plans is killed under load and comes back. Nothing is left at the end.
    """
    path = write_nodes(tmp_path, database.url)
    with ExitStack() as stack:
        clocks = {"a": {}, "b": shifted_clock(tmp_path)}
        both = {name: stack.enter_context(node(path, name, **clocks[name])) for name in "ab"}
        for each in both.values():
            each.await_ready()
        check_the_key_is_nowhere(tmp_path, both.values())
        for each in both.values():
            check_what_listens(each)
        gone = leader(database)
        lost, first = both.pop(gone), *both.values()
        everywhere = {"host:0@a", "host:0@b"}
        assert {agent["device"] for agent in status(first)["agents"]} == everywhere
        until(lambda: copies(first, "a") == copies(first, "b") == everywhere, "copies")
        with ThreadPoolExecutor(16) as pool:
            for each in (lost, first):
                assert set(pool.map(partial(answered, each), range(20))) == {200}
                check_no_clock_was_compared(each)
            asked = [pool.submit(answered, first, i) for i in range(200)]
            until(lambda: sum(each.done() for each in asked) > 20, "requests under way")
            below = descendants(lost.process.pid)
            lost.process.kill()
            assert {each.result() for each in asked} == {200}
        until(lambda: not any(map(alive, below)), "the killed node's processes are gone")
        back = stack.enter_context(node(path, gone))
        back.await_ready()
        until(lambda: copies(back, "a") == everywhere, "its copies again")
        assert answered(back, 1) == 200
        metrics = httpx.get(f"{first.url}/metrics").text
        for device in everywhere:
            labels = f'{{device="{device}",node="{device[-1]}"}}'
            assert f"prism_device_capacity_bytes{labels}" in metrics
        shown = first.operate("status").stdout
        assert f"nodes, {leader(database)} leads" in shown
        assert f"node {gone} joined" in first.output()
    assert keys_left(database) == []
    segments = f"prism-kvcached.{sole_namespace(first)}"
    assert not [p for p in Path("/dev/shm").iterdir() if p.name.startswith(segments)]


def sole_namespace(made: Node) -> str:
    key = (made.log.parent / "key").read_text().strip()
    return f"prism-{sha256(public_key(key).encode()).hexdigest()[:8]}"


def refusal(path: Path, name: str, *options: str) -> str:
    """Returns the one-line error with which the node does not start."""
    command = [*SERVE, "--config", str(path), "--node", name, "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_a_node_that_does_not_fit_is_refused(
    tmp_path: Path, database: BundledRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts nothing for another version or file, a node twice, a used port, or without Redis."""
    path = write_nodes(tmp_path, database.url)
    config = load(path, node="b")
    config = structs.replace(config, namespace=namespace_of(config))
    monkeypatch.setattr("prism.serve.node.registration._TTL_S", 1.0)
    monkeypatch.setattr("prism.serve.node.registration._RENEW_S", 0.2)
    with (
        joined(config, print),
        pytest.raises(ConfigError, match=r"--node: b is already running on"),
        joined(config, print),
    ):
        pass
    with redis.Redis.from_url(database.url) as client:
        key = f"{config.namespace}:node:b"
        for change, why in (
            ({"shared": "x"}, "nodes: b has other devices, models or settings"),
            (
                {"version": "0.0.0", "protocol": 0},
                "nodes: b runs version 0.0.0 with protocol 0, and this machine",
            ),
        ):
            client.set(key, msgspec.msgpack.encode(structs.replace(state_of(config), **change)))
            assert why in refusal(path, "a")
        client.delete(key)
    with socket.create_server(("127.0.0.1", config.nodes[0].port)):
        assert "a cannot listen on 127.0.0.1 port" in refusal(path, "a")
    away = write_nodes(tmp_path, f"redis://:x@127.0.0.1:{free_port()}")
    assert "redis: " in refusal(away, "a")
    assert keys_left(database) == []


def test_a_version_that_knows_more_keys_is_no_other_file(
    tmp_path: Path, database: BundledRedis
) -> None:
    """Accepts the version as long as no file uses the new keys."""
    config = load(write_nodes(tmp_path, database.url), node="a")
    newer = msgspec.defstruct("Newer", [("more", int, 1)], bases=(EngineConfig,), frozen=True)

    def digest(**changes: Any) -> str:
        engine = newer(**structs.asdict(config.engine), **changes)
        return state_of(structs.replace(config, engine=engine)).shared

    assert digest() == state_of(config).shared
    assert digest(more=2) != digest()
    assert state_of(structs.replace(config, policy="static")).shared != digest()


@pytest.mark.long
def test_redis_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves Redis under load, at one address, to an empty server with a clock minutes ahead."""
    folders = [tmp_path / name for name in ("old", "new")]
    for folder in folders:
        folder.mkdir()
    old = BundledRedis(folders[0], port=0)
    new = BundledRedis(folders[1], port=old.port)
    new.password = old.password
    path = write_nodes(tmp_path, old.url)
    with old, ExitStack() as stack, ThreadPoolExecutor(16) as pool:
        both = {name: stack.enter_context(node(path, name)) for name in "ab"}
        for each in both.values():
            each.await_ready()
        first, everywhere = both["a"], {"host:0@a", "host:0@b"}
        until(lambda: copies(first, "a") == copies(first, "b") == everywhere, "copies")
        asked = [pool.submit(answered, both["ab"[i % 2]], i) for i in range(200)]
        until(lambda: sum(each.done() for each in asked) > 20, "requests under way")
        old.kill()
        for name, value in shifted_clock(tmp_path).items():
            monkeypatch.setenv(name, value)
        new.start()
        monkeypatch.undo()
        moved_s = time.monotonic()
        assert {each.result() for each in asked} == {200}
        print(f"all were answered {time.monotonic() - moved_s:.1f} s after Redis had moved")
        until(lambda: copies(first, "a") == copies(first, "b") == everywhere, "copies")
        for each in both.values():
            assert answered(each, 1) == 200
            # Requests that waited meanwhile seem to have waited for the clocks' difference.
            check_no_clock_was_compared(each, ("prism_status_age_seconds",))
        for each in both.values():
            each.process.terminate()
        for each in both.values():
            assert each.process.wait(60) == 0
        assert keys_left(new) == []
    new.stop()
