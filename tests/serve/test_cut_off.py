"""Cuts of half a minute between machines under load, in both directions and in each one.

The two nodes are network namespaces whose clocks are five minutes apart. All requests go to both
frontends, and each answer's tokens are compared with the model's.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.frontend.tiny_model import make_model
from tests.serve.clocks import shifted_clock
from tests.serve.conftest import SERVE, until
from tests.serve.machines import REDIS_URL, Load, Machines, await_text, started
from tests.strangers import needs_root

DEVICE = {"name": "host:0", "capacity": "16MiB", "page": "64KiB", "engines": 2}
CUT_S = 30.0


@dataclass
class Cluster:
    machines: Machines
    logs: dict[str, Path]

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.machines.get(name, "/status"))
        return found

    def copies(self, name: str) -> set[str]:
        return set(self.status(name)["copies"].get("a", ()))

    def epoch(self, name: str, of: str) -> int:
        agents = {agent["device"]: agent for agent in self.status(name)["agents"]}
        return int(agents[of]["epoch"])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cut")
    make_model(folder / "a")
    machines = Machines("a", "b")
    nodes = [
        {"name": n, "address": where, "devices": [DEVICE]}
        for n, where in machines.addresses.items()
    ]
    data = {
        "nodes": nodes,
        "models": [{"name": "a", "path": "a", "replicas": {"min": 2, "max": 2}}],
        "engine": {"adapter": "fake", "static": "1MiB", "drain_timeout": "10s"},
        "redis": REDIS_URL,
        "cluster_key": "key",
    }
    (folder / "cluster.yaml").write_text(yaml.safe_dump(data))
    subprocess.run([*SERVE, "new-cluster-key", str(folder / "key")], check=True, timeout=60)
    more = {"PRISM_FAKE": '{"decode_step_ms": 25}'}
    with ExitStack() as stack:
        stack.callback(machines.remove)
        machines.make()
        stack.enter_context(started(machines.redis(folder), folder / "redis.log"))
        logs = {}
        for name in machines.addresses:
            logs[name] = folder / f"{name}.log"
            serve = [*SERVE, "--config", str(folder / "cluster.yaml"), "--node", name]
            serve += ["--log-dir", str(folder / f"{name}-logs")]
            mine = more if name == "a" else more | shifted_clock(folder)
            stack.enter_context(started(machines.inside(name) + serve, logs[name], **mine))
        for log in logs.values():
            await_text(log, "ready in ", 1, 120)
        yield Cluster(machines, logs)


def cut_both_ways(machines: Machines) -> Callable[[], None]:
    machines.cut("b")
    return lambda: machines.restore("b")


def hears_nothing(machines: Machines) -> Callable[[], None]:
    for other in ("a", "hub"):
        machines.cut_one_way(other, "b")
    return lambda: [machines.restore_one_way(other, "b") for other in ("a", "hub")] and None


def is_not_heard(machines: Machines) -> Callable[[], None]:
    for other in ("a", "hub"):
        machines.cut_one_way("b", other)
    return lambda: [machines.restore_one_way("b", other) for other in ("a", "hub")] and None


@pytest.mark.long
@needs_root
@pytest.mark.parametrize("cut", [cut_both_ways, hears_nothing, is_not_heard])
def test_cut_off_and_back(
    cluster: Cluster, cut: Callable[[Machines], Callable[[], None]], tmp_path: Path
) -> None:
    """Checks that no answer is wrong or lost, and that the cut machine's agent restarts empty."""
    machines, both = cluster.machines, {"host:0@a", "host:0@b"}
    until(lambda: cluster.copies("a") == both, "both copies", 60)
    before, ends = cluster.epoch("a", "host:0@b"), agent_log(cluster, "b").count(" ends: ")
    loads = {name: Load(machines, name, 4, seed) for seed, name in enumerate("ab")}
    time.sleep(5)
    mend, cut_s = cut(machines), time.monotonic()
    time.sleep(CUT_S)
    assert cluster.copies("a") in (set(), {"host:0@a"})
    mend()
    back_s = time.monotonic()
    until(lambda: cluster.copies("a") == both, "its copy again", 120)
    again_s = time.monotonic() - back_s
    assert cluster.epoch("a", "host:0@b") > before
    assert agent_log(cluster, "b").count(" ends: ") == ends + 1
    time.sleep(5)
    results = {name: load.results() for name, load in loads.items()}
    print(f"\n{cut.__name__}: its copy is back {again_s:.1f} s after the cut's end")
    for name, found in results.items():
        during = [r for r in found if r["ended_s"] > cut_s]
        longest_s = max(r["ended_s"] - r["began_s"] for r in during)
        late_s = max(r["ended_s"] for r in during if r["began_s"] < cut_s) - cut_s
        refused = [r for r in found if r["status"] == 503]
        wrong = [r for r in found if r not in refused and not r.get("right")]
        print(
            f"{name}: {len(found)} asked, {len(refused)} refused by name, {len(wrong)} wrong or"
            f" lost; the longest took {longest_s:.1f} s; what ran at the cut ended {late_s:.1f} s"
            f" after it"
        )
        assert not wrong
    assert not [r for r in results["a"] if r["status"] != 200]


def agent_log(cluster: Cluster, name: str) -> str:
    folder = cluster.logs[name].parent / f"{name}-logs"
    return "".join(path.read_text() for path in folder.glob("agent-*"))
