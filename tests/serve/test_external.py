"""External servers: memory by demand and SLO while it is short, and their ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from kvcached import ClientUsage, Device
from tests.ports import free_port
from tests.serve.conftest import Cluster, running, serving, until, write_yaml
from tests.serve.stand_in_server import CONTEXT, LAYOUT, PAGE_BYTES

MIB = 1 << 20
CAPACITY = 8 * MIB
FLOOR = LAYOUT.need_bytes(CONTEXT, PAGE_BYTES)
FLOOD = 24  # requests of the whole context, 12 MiB


class Roof:
    """A cluster, and the stand-in servers of its models "tight" and "loose", whose TPOT SLO is four
    times as long."""

    def __init__(self) -> None:
        self.namespace = f"t{uuid4().hex[:10]}"
        self.ports = [free_port() for _ in range(2)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._pool = ThreadPoolExecutor(3 * FLOOD)
        for port in self.ports:
            self.start(port)
        self.device = Device.open("host:0", namespace=self.namespace)
        until(lambda: len(self.device.usage().clients) == len(self.ports), "two clients")
        self.cluster: Cluster

    def start(self, port: int) -> None:
        module = "tests.serve.stand_in_server"
        command = [sys.executable, "-m", module, str(port), self.namespace, str(CAPACITY)]
        self._processes[port] = subprocess.Popen(command, cwd=Path(__file__).parents[2])
        until(lambda: self._listens(port), f"port {port}")

    @staticmethod
    def _listens(port: int) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200
        return False

    def models(self) -> list[dict[str, Any]]:
        slos = {"tight": "50ms", "loose": "200ms"}
        return [
            {
                "name": name,
                "adapter": "external",
                "servers": [f"http://127.0.0.1:{port}"],
                "slo": {"tpot": slo},
            }
            for (name, slo), port in zip(slos.items(), self.ports, strict=True)
        ]

    def ask(self, model: str, count: int, tokens: int = CONTEXT) -> list[Future[httpx.Response]]:
        """Sends requests, which are answered after `release`."""
        prompt = list(range(tokens))
        return [self._pool.submit(self.cluster.post, model, prompt=prompt) for _ in range(count)]

    def release(self, port: int) -> None:
        httpx.post(f"http://127.0.0.1:{port}/release", content=b"{}")

    def finish(self, *asked: Future[httpx.Response]) -> None:
        """Releases until all requests are answered."""

        def done() -> bool:
            for port in self.ports:
                with contextlib.suppress(httpx.TransportError):
                    self.release(port)
            return all(each.done() for each in asked)

        until(done, "answers")
        assert {each.result().status_code for each in asked} == {200}

    def client(self, port: int) -> ClientUsage:
        [found] = [c for c in self.device.usage().clients if c.name == f"stand-in:{port}"]
        return found

    def rows(self) -> dict[str, dict[str, Any]]:
        """Returns the servers in the cluster's status by their model."""
        status = httpx.get(f"{self.cluster.url}/status").json()
        return {row["model"]: row for row in status["external"]}

    def fill(self, model: str, port: int) -> None:
        """Fills the device with cached prefixes of a server."""
        asked = self.ask(model, 13)
        until(lambda: self.client(port).reserved_bytes > 6 * MIB, "pages")
        self.finish(*asked)
        until(lambda: self.client(port).evictable_bytes > 6 * MIB, "cached prefixes")

    def is_own(self) -> bool:
        """Returns whether all servers have their own minimums and limits."""
        clients = [self.client(port) for port in self.ports]
        return all((c.min_bytes, c.limit_bytes) == (FLOOR, None) for c in clients)

    def kill(self, port: int) -> None:
        self._processes[port].kill()
        self._processes[port].wait()

    def close(self) -> None:
        for port in self.ports:
            with contextlib.suppress(httpx.TransportError):
                self.release(port)
            self.kill(port)
        self._pool.shutdown(wait=False, cancel_futures=True)
        Device.unlink(self.namespace, "host:0", force=True)


@pytest.fixture
def roof(tmp_path: Path, short_dir: Path) -> Iterator[Roof]:
    with (
        contextlib.closing(Roof()) as made,
        serving(tmp_path, short_dir, devices=[], models=made.models()) as cluster,
    ):
        made.cluster = cluster
        until(lambda: len(made.rows()) == len(made.ports), "the servers in the status")
        yield made


def test_a_burst_takes_idle_memory_and_limits_end_with_it(roof: Roof) -> None:
    tight, loose = roof.ports
    roof.fill("loose", loose)
    until(roof.is_own, "no limits while nobody wants memory")
    asked = roof.ask("tight", FLOOD)
    until(lambda: roof.client(tight).reserved_bytes > 6 * MIB, "the idle server's memory")
    held = roof.client(loose)
    assert held.limit_bytes is not None
    assert held.reserved_bytes <= held.limit_bytes < 2 * MIB
    assert held.min_bytes == FLOOR
    until(lambda: "24 open requests" in roof.rows()["tight"]["reason"], "the reason")
    rows = roof.rows()
    assert rows["tight"]["load"]["requests"] == FLOOD
    assert rows["loose"]["reason"].startswith("idle; keeps ")
    roof.finish(*asked)
    until(roof.is_own, "their own limits")


def test_room_that_both_want_is_divided_by_slo(roof: Roof) -> None:
    asked = [*roof.ask("tight", FLOOD), *roof.ask("loose", FLOOD)]

    def are_divided() -> bool:
        limits = {c.name: c.limit_bytes or 0 for c in roof.device.usage().clients}
        tight, loose = (limits[f"stand-in:{port}"] - FLOOR for port in roof.ports)
        whole = tight + loose + 2 * FLOOR == pytest.approx(CAPACITY, rel=0.02)
        return whole and tight == pytest.approx(4 * loose, rel=0.02)

    until(are_divided, "four times the limit")
    roof.finish(*asked)


@pytest.mark.parametrize("killed", [True, False])
def test_limits_end_with_the_scheduler_or_pass_to_the_next(roof: Roof, killed: bool) -> None:
    tight, loose = roof.ports
    roof.fill("loose", loose)
    asked = roof.ask("tight", FLOOD)
    until(lambda: roof.client(tight).min_bytes > FLOOR, "a guarantee")
    if killed:
        os.kill(roof.cluster.child("prism.cluster"), signal.SIGKILL)
        until(lambda: "scheduler ended" in roof.cluster.output(), "the end")
        roof.finish(*asked)
    else:
        roof.cluster.stop()
    until(roof.is_own, "their own limits")


def test_an_operators_limit_holds(roof: Roof) -> None:
    tight, loose = roof.ports
    roof.device.set_limit(f"stand-in:{tight}", 2 * MIB)
    until(lambda: roof.rows()["tight"]["clients"][0]["own_limit_bytes"] == 2 * MIB, "the limit")
    roof.fill("loose", loose)
    asked = roof.ask("tight", FLOOD)
    until(lambda: roof.rows()["tight"]["load"]["requests"] == FLOOD, "requests")
    until(lambda: roof.client(tight).reserved_bytes > MIB, "pages")
    assert roof.client(tight).limit_bytes == 2 * MIB
    roof.device.set_limit(f"stand-in:{tight}", 3 * MIB)
    until(lambda: roof.client(tight).reserved_bytes > 2 * MIB, "the limit while it is divided")
    roof.finish(*asked)
    until(lambda: roof.client(loose).limit_bytes is None, "the other's own limit")
    assert roof.client(tight).limit_bytes == 3 * MIB


def test_a_killed_server_is_named_and_another_takes_its_memory(roof: Roof) -> None:
    tight, loose = roof.ports
    roof.fill("loose", loose)
    roof.kill(loose)
    url = f"http://127.0.0.1:{loose}"
    until(lambda: url in httpx.get(f"{roof.cluster.url}/health").text, "the URL")
    assert roof.cluster.post("loose").status_code == 503
    asked = roof.ask("tight", 8)
    until(lambda: roof.client(tight).reserved_bytes > 4 * MIB, "the dead server's memory")
    roof.finish(*asked)
    roof.start(loose)
    until(lambda: not roof.rows()["loose"]["problem"], "the server again")
    roof.finish(*roof.ask("loose", 2))
    until(lambda: roof.rows()["loose"]["clients"], "its client")
    assert [c["client"] for c in roof.rows()["loose"]["clients"]] == [f"stand-in:{loose}"]


def test_what_cannot_be_done_is_said(roof: Roof, tmp_path: Path) -> None:
    stranger = free_port()
    command = [sys.executable, "-m", "http.server", str(stranger), "--bind", "127.0.0.1"]
    with running(command, roof.cluster.run_dir.parent / "stranger.log", os.environ):
        (tmp_path / "changed").mkdir()
        models = [*roof.models()[:1], {**roof.models()[1], "servers": [_url(stranger)]}]
        changed = write_yaml(tmp_path / "changed", devices=[], models=models)
        reloaded = roof.cluster.operate("reload", str(changed))
        assert "changed external loose" in reloaded.stdout, reloaded.stderr
        until(lambda: roof.rows()["loose"]["unmanaged"], "what is not managed")
        assert "start it with KVCACHED_DEVICE" in roof.rows()["loose"]["unmanaged"]
        until(lambda: "404" in roof.rows()["loose"]["problem"], "the problem")
        evicted = roof.cluster.operate("evict", "loose")
        assert evicted.returncode != 0
        assert "loose is external" in evicted.stdout + evicted.stderr


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"
