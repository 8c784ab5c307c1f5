"""External servers that sleep while they are idle. A stand-in ends if it is put to sleep while a
request runs, or gets a request while it sleeps."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import httpx
import pytest
from redis import Redis

from kvcached import Device
from tests.ports import free_port
from tests.serve.conftest import Cluster, serving, until

CAPACITY = 8 << 20
CLIENTS = 12
LOAD_S = 8.0


class Server:
    """A stand-in server."""

    def __init__(self, namespace: str, api: str) -> None:
        self._namespace, self._api = namespace, api
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        module = "tests.serve.stand_in_server"
        command = [sys.executable, "-m", module, str(self.port), self._namespace, str(CAPACITY)]
        self.process = subprocess.Popen([*command, self._api], cwd=Path(__file__).parents[2])
        until(self._listens, self.url)

    def _listens(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/v1/models").status_code == 200
        return False

    def sleep_state(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/sleep_state").json()
        return found

    def sleeps(self) -> bool:
        return bool(self.sleep_state()["asleep"])

    def refuse(self, count: int) -> None:
        httpx.post(f"{self.url}/refuse", json=count)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Sleepers:
    """A cluster with one model, "m"."""

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.namespace = f"t{uuid4().hex[:10]}"
        self._folder, self._temporary = folder, temporary
        self.servers: list[Server] = []
        self.cluster: Cluster

    def server(self, api: str) -> Server:
        self.servers.append(Server(self.namespace, api))
        return self.servers[-1]

    @contextlib.contextmanager
    def serving(self, *servers: Server, **more: Any) -> Iterator[Cluster]:
        model = {"name": "m", "adapter": "external", "sleep_after": "1s"}
        models = [{**model, "servers": [server.url for server in servers]}]
        made = {"devices": [], "models": models, **more}
        with serving(self._folder, self._temporary, **made) as self.cluster:
            yield self.cluster

    def row(self) -> dict[str, Any]:
        """Returns the first server's row. Empty: the scheduler has not read it yet."""
        rows = httpx.get(f"{self.cluster.url}/status").json()["external"]
        return dict(rows[0]) if rows else {}

    def await_sleep(self, server: Server) -> None:
        """Waits until a server sleeps and the status says so."""
        until(server.sleeps, "sleep")
        until(lambda: self.row().get("asleep"), "the status")

    def ask(self) -> int:
        return self.cluster.post("m").status_code


@pytest.fixture
def sleepers(tmp_path: Path, short_dir: Path) -> Iterator[Sleepers]:
    made = Sleepers(tmp_path, short_dir)
    try:
        yield made
    finally:
        for server in made.servers:
            server.end()
        Device.unlink(made.namespace, "host:0", force=True)


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_an_idle_server_sleeps_until_a_request(sleepers: Sleepers, api: str) -> None:
    """Checks also that a cluster wakes it when it stops."""
    server = sleepers.server(api)
    with sleepers.serving(server) as cluster:
        sleepers.await_sleep(server)
        assert sleepers.ask() == 200
        assert server.sleep_state() == {"asleep": False, "paused": False, "sleeps": 1}
        until(server.sleeps, "sleep again")
        cluster.stop()
        assert server.sleep_state() == {"asleep": False, "paused": False, "sleeps": 2}


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_requests_around_the_moment_of_falling_asleep_are_answered(
    sleepers: Sleepers, api: str
) -> None:
    servers = [sleepers.server(api), sleepers.server(api)]
    frontend = {"port": 0, "processes": 2}
    with sleepers.serving(*servers, frontend=frontend), ThreadPoolExecutor(CLIENTS) as pool:
        until(lambda: all(server.sleeps() for server in servers), "sleep")
        end_s = time.monotonic() + LOAD_S

        def ask(number: int) -> set[int]:
            rng, found = Random(number), set()
            while time.monotonic() < end_s:
                found.add(sleepers.ask())
                # All clients return around one second after their last requests.
                wait_s = 1 - time.monotonic() % 1 + rng.uniform(0.9, 1.4)
                time.sleep(wait_s if rng.random() < 0.9 else 0)
            return found

        assert set().union(*pool.map(ask, range(CLIENTS))) == {200}
        assert [server.process.poll() for server in servers] == [None, None]
        assert sum(server.sleep_state()["sleeps"] for server in servers) >= 4


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_the_next_scheduler_wakes_it(sleepers: Sleepers, api: str) -> None:
    server = sleepers.server(api)
    with sleepers.serving(server) as cluster:
        sleepers.await_sleep(server)
        os.kill(cluster.child("prism.cluster"), signal.SIGKILL)
        assert sleepers.ask() == 200
        assert server.process.poll() is None
        until(server.sleeps, "sleep again")


def test_a_server_that_was_started_again_is_awake(sleepers: Sleepers) -> None:
    server = sleepers.server("sglang")
    with sleepers.serving(server):
        until(server.sleeps, "sleep")
        server.end()
        server.start()
        assert sleepers.ask() == 200
        assert server.process.poll() is None


@pytest.mark.parametrize(
    ("api", "why"), [("none", "neither vLLM's sleep mode"), ("sglang-old", "it refuses to sleep")]
)
def test_what_does_not_sleep_is_said(sleepers: Sleepers, api: str, why: str) -> None:
    server = sleepers.server(api)
    with sleepers.serving(server):
        until(lambda: sleepers.row().get("no_sleep"), "the reason")
        assert why in sleepers.row()["no_sleep"]
        assert not sleepers.row().get("asleep")
        assert sleepers.ask() == 200


def test_a_wake_that_fails_is_said_and_tried_again(sleepers: Sleepers) -> None:
    server = sleepers.server("vllm")
    with sleepers.serving(server), ThreadPoolExecutor(1) as pool:
        until(server.sleeps, "sleep")
        server.refuse(3)
        asked = pool.submit(sleepers.ask)
        until(lambda: "500" in sleepers.row().get("problem", ""), "the problem")
        assert server.url in httpx.get(f"{sleepers.cluster.url}/health").text
        assert asked.result() == 200
        until(lambda: not sleepers.row().get("problem"), "no problem")


def test_a_server_that_cannot_be_woken_is_left_out(sleepers: Sleepers) -> None:
    """Ends a request after `engine.activation_timeout` without another server."""
    server, other = sleepers.server("sglang"), sleepers.server("sglang")
    engine = {"adapter": "fake", "static": "1MiB", "activation_timeout": "3s"}
    with sleepers.serving(server, other, engine=engine):
        until(lambda: server.sleeps() and other.sleeps(), "sleep")
        server.refuse(1000)
        assert {sleepers.ask() for _ in range(4)} == {200}
        other.end()
        answers = [sleepers.cluster.post("m") for _ in range(2)]
        assert {answer.status_code for answer in answers} == {503}
        assert any(f"{server.url} was not woken in time" in each.text for each in answers)
        server.refuse(0)
        until(lambda: sleepers.ask() == 200, "an answer")


@pytest.mark.parametrize("is_killed", [True, False])
def test_the_loss_of_redis_data_hides_no_sleep(sleepers: Sleepers, *, is_killed: bool) -> None:
    server = sleepers.server("sglang")
    with sleepers.serving(server) as cluster:
        until(server.sleeps, "sleep")
        if is_killed:
            os.kill(cluster.child("valkey-server"), signal.SIGKILL)
            until(lambda: "redis ended (signal SIGKILL); restarting" in cluster.output(), "notice")
        else:
            config = json.loads((cluster.run_dir / "cluster.json").read_text())
            with Redis.from_url(config["redis_url"]) as client:
                client.flushall()
        time.sleep(2)
        assert server.sleeps()
        until(lambda: sleepers.ask() == 200, "an answer")
        assert server.process.poll() is None
        until(server.sleeps, "sleep again")
