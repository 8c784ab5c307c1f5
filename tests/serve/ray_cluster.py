"""Machines of a Ray cluster: network namespaces, with a raylet each."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from prism.serve.on_ray.ray_machines import HOST_DEVICES
from tests.frontend.tiny_model import make_model
from tests.ports import free_port
from tests.serve.conftest import SERVE, until
from tests.serve.machines import REDIS_URL, Machines, await_text, run, started
from tests.serve.ray_environment import ray_bin

# Ray looks for other Ray instances among all processes, also those of other namespaces. Its
# workers' ports end at 19999.
RAY_PORT = next(port for port in iter(free_port, 0) if port > 19999)
ADDRESS = f"10.77.0.1:{RAY_PORT}"
DEVICE = {"name": "host:*", "capacity": "16MiB", "page": "64KiB", "engines": 2}
ASK = """
import httpx, sys
for _ in range(int(sys.argv[1])):
    body = {"model": "a", "prompt": [9, 8, 7], "max_tokens": 12, "ignore_eos": True}
    url = "http://127.0.0.1:8000/v1/completions"
    answer = httpx.post(url, json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
"""


def runs(log: Path) -> bool:
    return "block forever" in log.read_text()


def runs_or_ended(process: subprocess.Popen[bytes], log: Path) -> bool:
    return process.poll() is not None or runs(log)


class RayCluster:
    """Machines `names`, each with a raylet and `devices` host devices, and a Redis server.

    `drive` runs the command on the first machine, `a`. Ray is not started on those in `later`.
    """

    def __init__(
        self,
        names: str,
        devices: int,
        folder: Path,
        short_dir: Path,
        stack: ExitStack,
        *,
        later: str = "",
    ) -> None:
        self.machines, self.names, self._devices = Machines(*names), names, devices
        make_model(folder / "a")
        self.folder, self.temporary, self._bin, self._stack = folder, short_dir, ray_bin(), stack
        self._ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._ray |= {"RAY_USAGE_STATS_ENABLED": "0", "TMPDIR": str(short_dir)}
        self._ray["PRISM_FAKE"] = json.dumps({"decode_step_ms": 25})
        self._starts = 0
        stack.callback(self.machines.remove)
        self.machines.make()
        redis = started(self.machines.redis(folder), folder / "redis.log")
        stack.enter_context(redis)
        for name in self.names:
            if name not in later:
                self.start_ray(name)

    def start_ray(self, name: str) -> subprocess.Popen[bytes]:
        where = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        where += [f"--temp-dir={self.temporary}/ray"]
        if name != "a":
            where = [f"--address={ADDRESS}"]
        where += [f"--node-ip-address={self.machines.addresses[name]}", "--num-cpus=2", "--block"]
        where += ["--object-store-memory=80000000"]
        where += ["--resources", json.dumps({HOST_DEVICES: self._devices})]
        command = [*self.machines.inside(name), str(self._bin / "ray"), "start", *where]
        for _ in range(5):  # exits if a part takes over 30 s, as on a busy machine
            self._starts += 1
            log = self.folder / f"ray-{name}-{self._starts}.log"
            process = self._stack.enter_context(started(command, log, **self._ray))
            until(partial(runs_or_ended, process, log), "Ray runs, or has ended", 300)
            if runs(log):
                return process
        raise AssertionError(log.read_text())

    def write_yaml(self, **changes: Any) -> Path:
        """Writes a configuration without nodes, as Ray names the machines."""
        data = {
            "ray": ADDRESS,
            "devices": [DEVICE],
            "engine": {"adapter": "fake", "static": "1MiB", "drain_timeout": "10s"},
            "redis": REDIS_URL,
            **changes,
        }
        path = self.folder / "cluster.yaml"
        path.write_text(yaml.safe_dump(data))
        return path

    def up(self, path: Path) -> list[str]:
        up = [str(self._bin / "python"), *SERVE[1:], "up", "--config", str(path)]
        return self.machines.inside("a") + up

    @contextmanager
    def drive(
        self, log: Path, frontends: int = 0, **changes: Any
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Runs `prism-serve up` on the first machine. The cluster is ready when the block begins.

        Args:
            frontends: number of machines with a frontend; 0 means all.
        """
        with started(self.up(self.write_yaml(**changes)), log, **self._ray) as driver:
            await_text(log, ": ready in ", frontends or len(self.names), 400)
            yield driver

    def refusal(self, path: Path, **variables: str) -> str:
        """Returns the one-line error of a command that starts nothing."""
        done = subprocess.run(
            self.up(path),
            capture_output=True,
            text=True,
            env={**os.environ, **self._ray, **variables},
            timeout=240,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1
        self.await_nothing_left()
        return done.stderr

    def run_ray(self, code: str) -> subprocess.Popen[str]:
        """Starts another Ray program on the first machine, until its standard input is closed."""
        return subprocess.Popen(
            [*self.machines.inside("a"), str(self._bin / "python"), "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self._ray},
        )

    def kill_ray(self, name: str) -> None:
        """Kills all Ray processes on a machine, workers included."""
        # The driver's process that talks to Ray is not killed.
        words = ("ray start", "/ray/core/", "/ray/_private/", "/ray/dashboard/", "ray::")
        for pid in self.machines.pids(name, *words):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def restart_ray(self) -> None:
        """Restarts Ray on all machines.

        Raylets end if the head is new and does not know them. They see each other's processes here,
        so all are killed before one is started.
        """
        for name in self.names:
            self.kill_ray(name)
        for name in self.names:
            self.start_ray(name)

    def operate(self, name: str, *arguments: str) -> str:
        """Runs an operator command on a machine, for the part of the cluster there."""
        states = (json.loads(p.read_text()) | {"at": p} for p in self._run_dirs())
        (run_dir,) = (str(s["at"].parent) for s in states if s.get("node") == name)
        return run(*self.machines.inside(name), *SERVE, *arguments, "--run-dir", run_dir)

    def _run_dirs(self) -> list[Path]:
        return list(self.temporary.glob("prism-*/cluster.json"))

    def ask(self, name: str, count: int = 5) -> None:
        run(*self.machines.inside(name), sys.executable, "-c", ASK, str(count))

    def agents(self) -> list[int]:
        return [pid for name in self.names for pid in self.machines.pids(name, "prism.agent")]

    def await_nothing_left(self) -> None:
        """Waits until the cluster's processes have ended. No folder, key or segment may be left."""
        words = ("prism.agent", "prism-node-", "on_ray")

        def left() -> list[int]:
            return [pid for name in self.names for pid in self.machines.pids(name, *words)]

        until(lambda: not left(), "no process is left", 90)
        assert list(self.temporary.glob("prism-*")) == []
        assert self.machines.redis_keys() == "[]\n"
        assert [self.machines.segments(name) for name in self.names] == [[] for _ in self.names]
