"""Junk in keys that the console's thread and nodes read without a queue: both keep running."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest
from redis import Redis

from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.endpoints import NodeConfig
from prism.messages.agent import AgentReport
from prism.messages.cluster import ClusterStatus
from prism.queueing.server import BundledRedis
from prism.serve.console import engine_restarts
from prism.serve.node import registration as node
from prism.serve.on_ray import cluster_lease
from tests.junk import JUNK, junk_into
from tests.serve.conftest import until


@pytest.fixture
def client(redis_server: BundledRedis) -> Iterator[Redis]:
    with Redis.from_url(redis_server.url) as made:
        yield made


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_restarts, "_POLL_S", 0.01)
    monkeypatch.setattr(node, "_RENEW_S", 0.01)
    monkeypatch.setattr(cluster_lease, "_RENEW_S", 0.01)
    monkeypatch.setattr(cluster_lease, "_TTL_S", 60.0)


def config_of(url: str, namespace: str, folder: Path) -> ClusterConfig:
    nodes = [NodeConfig(name, "127.0.0.1", 1, 1, 1) for name in ("a", "b")]
    return ClusterConfig(
        namespace=namespace,
        run_dir=str(folder),
        redis_url=url,
        policy="prism",
        devices=[],
        models=[],
        nodes=nodes,
        node="a",
    )


@pytest.mark.parametrize("junk", JUNK)
def test_the_console_prints_engines_after_junk(
    redis_server: BundledRedis,
    client: Redis,
    namespace: str,
    tmp_path: Path,
    junk: str,
) -> None:
    said: list[str] = []
    key = f"{namespace}:status"
    with engine_restarts.print_engine_restarts(
        config_of(redis_server.url, namespace, tmp_path), said.append
    ):
        for count in range(1, 4):
            junk_into(client, key, junk, Random(count))
            threading.Event().wait(0.05)
            agent = AgentReport("host:0", 1, 0.0, 1, 1, 0, 0, 0, 1, 0, 1, [])
            agent = msgspec.structs.replace(agent, engine_restarts_total=count)
            client.set(key, msgspec.msgpack.encode(ClusterStatus(0.0, "prism", {}, [agent])))
            until(lambda count=count: len(said) == count, "a line")


@pytest.mark.parametrize("junk", JUNK)
def test_a_node_lives_and_knows_the_others_after_junk(
    redis_server: BundledRedis, client: Redis, namespace: str, tmp_path: Path, junk: str
) -> None:
    said: list[str] = []
    config = config_of(redis_server.url, namespace, tmp_path)
    other = msgspec.msgpack.encode(node.state_of(config))
    keys = [node.node_key(namespace, name) for name in ("a", "b")]
    for key in keys:
        junk_into(client, key, junk, Random(junk))
    with node.joined(config, said.append):
        for seed in range(3):
            for key in keys:
                junk_into(client, key, junk, Random(seed))
            until(lambda: node.registered(config, client).keys() >= {"a"}, "its state again")
            client.delete(keys[1])
            client.set(keys[1], other)
            until(lambda: "node b joined" in said, "the other node")
            client.delete(keys[1])
            until(lambda: "node b left" in said, "its end")
            said.clear()


@pytest.mark.parametrize("junk", JUNK)
def test_the_clusters_lease_is_written_over_junk(
    redis_server: BundledRedis, client: Redis, junk: str
) -> None:
    lease = cluster_lease.ClusterLease(redis_server.url, "x" * 40)
    key = cluster_lease._key(lease._namespace)
    try:
        for seed in range(3):
            junk_into(client, key, junk, Random(seed))
            until(lambda: client.type(key) == b"string", "a string")
            until(lambda: client.get(key) == cluster_lease.SERVE, "the lease")
        assert not lease.is_over()
    finally:
        lease.close()
