"""Three machines of a Ray cluster under load from outside.

One is killed and comes back, and is cut off for half a minute. Ray's head is started again, and all
machines are restarted one after the other. Each request has one answer, the right one.
lab/campaigns has what was printed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.acceptance.conftest import prepare
from tests.acceptance.harness import model_yaml
from tests.acceptance.reference import is_greedy
from tests.frontend.tiny_model import make_model
from tests.serve.conftest import until
from tests.serve.machines import Load, await_text
from tests.serve.ray_cluster import RayCluster
from tests.strangers import needs_root

CUT_S = 30.0
LOST = "c"  # has no frontend, so that no client is cut off with it
RECOVER_S = 180.0


@dataclass
class Setup:
    """Devices, models and load of a campaign.

    `devices` is the number on each machine.
    """

    devices: Mapping[str, int]
    device: dict[str, Any]
    models: list[dict[str, Any]]
    engine: dict[str, Any]
    rate: float
    tokens: int
    requests: int  # at least

    @property
    def names(self) -> list[str]:
        return [model["name"] for model in self.models]

    def nodes(self, addresses: Mapping[str, str]) -> list[dict[str, Any]]:
        nodes = []
        for name, address in addresses.items():
            devices = [{**self.device, "name": f"host:{i}"} for i in range(self.devices[name])]
            node = {"name": name, "address": address, "devices": devices}
            nodes.append({**node, "frontends": int(name != LOST)})
        return nodes

    def is_right(self, result: dict[str, Any]) -> bool:
        if self.engine["adapter"] == "fake":
            return bool(result["right"])
        ids = tuple(result["ids"])
        whole = len(ids) == self.tokens
        return whole and is_greedy(result["model"], tuple(result["prompt"]), ids)


def fake(folder: Path) -> Setup:
    """Sets up six devices and a model for each."""
    names = [f"m{number}" for number in range(6)]
    for name in names:
        make_model(folder / name)
    return Setup(
        devices={"a": 2, "b": 2, "c": 2},
        device={"capacity": "16MiB", "page": "64KiB", "engines": 3},
        models=[{"name": name, "path": name} for name in names],
        engine={"adapter": "fake", "static": "1MiB", "drain_timeout": "10s"},
        rate=7,
        tokens=40,
        requests=2000,
    )


def sglang(_folder: Path) -> Setup:
    """Sets up two devices, on the machine that is lost and on another one."""
    prepare("tiny-llama", "tiny-qwen3")
    return Setup(
        devices={"a": 0, "b": 1, "c": 1},
        device={"capacity": "192MiB", "page": "64KiB", "engines": 2},
        models=[model_yaml("tiny-llama"), model_yaml("tiny-qwen3")],
        engine={"adapter": "sglang", "drain_timeout": "10s"},
        rate=2,
        tokens=24,
        requests=2000,
    )


class Campaign:
    """Faults of the machines, and how long the cluster takes to recover from each."""

    def __init__(self, cluster: RayCluster, setup: Setup, log: Path) -> None:
        self.cluster, self.setup, self.log = cluster, setup, log
        self.events: list[tuple[str, float]] = []

    def status(self, name: str = "a") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.cluster.machines.get(name, "/status"))
        return found

    def epochs(self, node: str) -> dict[str, int]:
        """Returns device -> epoch of the node's agents that have reported recently."""
        agents = self.status("a" if node != "a" else "b")["agents"]
        found = {agent["device"]: int(agent["epoch"]) for agent in agents}
        return {device: epoch for device, epoch in found.items() if device.endswith(f"@{node}")}

    def placed(self, node: str) -> list[str]:
        """Returns the models that are placed on the node."""
        placement = self.status()["placement"]
        return [name for name, device in placement.items() if device.endswith(f"@{node}")]

    def served_elsewhere(self, node: str) -> bool:
        """Returns whether all models are up on other machines."""
        placement = self.status()["placement"]
        return len(placement) == len(self.setup.names) and not self.placed(node)

    def fill(self, node: str) -> None:
        """Moves a model to each device of the node."""
        for number in range(self.setup.devices[node]):
            model = self.setup.names[number]
            self.cluster.operate("a", "migrate", model, f"host:{number}@{node}")
        until(lambda: len(self.placed(node)) >= self.setup.devices[node], "its models", 60)

    @contextmanager
    def event(self, what: str) -> Iterator[None]:
        """Times an event, whose block ends when the cluster has recovered."""
        began_s = time.monotonic()
        self.events.append((what, began_s))
        yield
        print(f"{what}: recovered after {time.monotonic() - began_s:.1f} s", flush=True)

    def killed_and_back(self) -> None:
        self.fill(LOST)
        before = self.epochs(LOST)
        with self.event("machine killed"):
            self.cluster.machines.kill(LOST)
            until(lambda: self.served_elsewhere(LOST), "its models elsewhere", RECOVER_S)
        with self.event("killed machine's Ray started"):
            self.cluster.start_ray(LOST)
            self.await_new_agents(LOST, before)

    def cut_off(self) -> None:
        self.fill(LOST)
        before = self.epochs(LOST)
        with self.event("machine cut off"):
            self.cluster.machines.cut(LOST)
            cut_s = time.monotonic()
            until(lambda: self.served_elsewhere(LOST), "its models elsewhere", RECOVER_S)
        time.sleep(max(0.0, cut_s + CUT_S - time.monotonic()))
        self.cluster.machines.restore(LOST)
        with self.event("cut ended"):
            self.await_new_agents(LOST, before)

    def await_new_agents(self, node: str, before: Mapping[str, int]) -> None:
        wanted = self.setup.devices[node]

        def there() -> bool:
            now = self.epochs(node)
            newer = [device for device, epoch in now.items() if epoch > before.get(device, -1)]
            return len(newer) == wanted

        until(there, f"all agents of {node}", RECOVER_S)

    def head_restarted(self) -> None:
        """Restarts Ray's head and the raylets, as systemd does. Agents do not depend on Ray."""
        agents = self.cluster.agents()
        with self.event("Ray's head killed"):
            self.cluster.kill_ray("a")
            await_text(self.log, "lost Ray", 1, RECOVER_S)
            self.cluster.restart_ray()
            await_text(self.log, "reconnected to Ray", 1, RECOVER_S)
        assert self.cluster.agents() == agents

    def restarted_in_turn(self) -> None:
        for name in self.cluster.names:
            before = self.epochs(name)
            with self.event(f"machine {name} drained and restarted"):
                if self.setup.devices[name]:
                    self.cluster.operate(name, "drain", f"@{name}")
                ended = self.log.read_text().count(f"{name}: ended; ")
                self.cluster.operate(name, "down", "--here")
                await_text(self.log, f"{name}: ended; ", ended + 1, RECOVER_S)
                self.await_new_agents(name, before)
                if name != LOST:
                    until(partial(self.answers, name), "its frontend", RECOVER_S)
                if self.setup.devices[name]:
                    self.cluster.operate(name, "undrain", f"@{name}")

    def answers(self, name: str) -> bool:
        try:
            return '"ready"' in self.cluster.machines.get(name, "/health")
        except AssertionError:  # nothing listens yet
            return False

    def judge(self, results: list[dict[str, Any]]) -> None:
        wrong = [r for r in results if r["status"] != 200 or not self.setup.is_right(r)]
        longest_s = max(r["ended_s"] - r["began_s"] for r in results)
        print(
            f"{len(results)} requests, {len(wrong)} lost or wrong, the longest {longest_s:.1f} s,"
            f" {sum(r['passed_over'] for r in results)} times another frontend was asked"
        )
        for what, event_s in self.events:
            open_then = [r for r in results if r["began_s"] < event_s < r["ended_s"]]
            last_s = max((r["ended_s"] - event_s for r in open_then), default=0.0)
            print(f"{what}: {len(open_then)} requests ran, the last ended after {last_s:.1f} s")
        assert not wrong, wrong[:3]
        numbers = [r["number"] for r in results]
        assert sorted(numbers) == list(range(len(numbers)))
        assert len(results) >= self.setup.requests


@pytest.mark.long
@needs_root
@pytest.mark.timeout(2700)
@pytest.mark.parametrize("make", [fake, pytest.param(sglang, marks=pytest.mark.sglang)])
def test_three_machines(make: Any, tmp_path: Path) -> None:
    setup, log = make(tmp_path), tmp_path / "up"
    settings = {
        "models": setup.models,
        "engine": setup.engine,
        "devices": [],
        "frontend": {"host": "0.0.0.0"},
        "access": {"open_to_all": True},
    }
    with ExitStack() as stack:
        short_dir = Path(stack.enter_context(TemporaryDirectory(prefix="prism-")))
        cluster = RayCluster("abc", 2, tmp_path, short_dir, stack)
        addresses = cluster.machines.addresses
        settings["nodes"] = setup.nodes(addresses)
        urls = [f"http://{addresses[name]}:8000" for name in "ab"]
        options = ["--urls", *urls, "--models", *setup.names, "--tokens", str(setup.tokens)]
        driver = stack.enter_context(cluster.drive(log, frontends=2, **settings))
        campaign = Campaign(cluster, setup, log)
        load = Load(cluster.machines, "hub", setup.rate, 0, *options)
        until(lambda: len(campaign.epochs(LOST)) == setup.devices[LOST], "all agents", 120)
        time.sleep(20)
        campaign.killed_and_back()
        time.sleep(20)
        campaign.cut_off()
        time.sleep(20)
        campaign.head_restarted()
        campaign.restarted_in_turn()
        ran_s = time.monotonic() - campaign.events[0][1] + 20
        time.sleep(max(10.0, 1.15 * setup.requests / setup.rate - ran_s))
        campaign.judge(load.results())
        cluster.operate("a", "down")
        assert driver.wait(120) == 0
        cluster.await_nothing_left()
