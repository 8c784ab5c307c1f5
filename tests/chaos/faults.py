"""Faults of a running cluster: their targets and times are a pure function of a seed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import redis
import zmq

from prism.config.resolved import read_resolved
from prism.config.schema.cluster_config import ClusterConfig
from prism.messages.troubles import read_troubles
from tests.serve.conftest import Cluster, alive, descendants

SHM_BYTES, LOG_BYTES = 256 << 20, 64 << 20
# Python that the launcher runs first: mounts small file systems, so that faults can fill them.
OWN_FILE_SYSTEMS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def check(code):
    if code: raise OSError(ctypes.get_errno(), "own file systems need CAP_SYS_ADMIN")
check(libc.unshare(0x20000))
check(libc.mount(None, b"/", None, 0x44000, None))
for path, size in ((b"/dev/shm", {shm}), ({logs!r}, {log})):
    check(libc.mount(b"tmpfs", path, b"tmpfs", 0, b"mode=%o,size=%d" % (0o700, size)))
"""
# Command line, or name of a forked process -> part.
PARTS = {
    "prism.frontend": "frontend",
    "prism.agent": "agent",
    "prism.cluster": "scheduler",
    "valkey-server": "redis",
    "prism.engines.processes.forkserver": "preloaded",
}
FORKED = {"prism-forks": "forkserver", "prism-engine": "engine", "prism-rank": "rank"}
GARBAGE = (b"", b"\xc1", b"\x91" * 200_000, b"\x82\xa4type\xa6Cancel\xabrequest_ids\x91\xa2\xff")
_FULL_S = 5.0
_REDIS_S = 30.0  # longer than any fault blocks Redis


@dataclass(frozen=True)
class Fault:
    """One fault: `pick` chooses among several targets; `pause_s` passes before it, `length_s`
    during it."""

    kind: str
    target: str
    pick: float
    pause_s: float
    length_s: float = 0.0

    def __str__(self) -> str:
        length = f" {self.length_s:g} s" if self.length_s else ""
        return f"{self.kind} {self.target}{length}"


def schedule(seed: int, counts: Mapping[tuple[str, str, float], int]) -> list[Fault]:
    """Returns faults in random order, at random moments. `counts`: (kind, target, length) ->
    number."""
    rng = Random(seed)
    faults = [
        Fault(kind, target, rng.random(), rng.uniform(0.1, 3.0), length_s)
        for (kind, target, length_s), count in counts.items()
        for _ in range(count)
    ]
    rng.shuffle(faults)
    return faults


def setup_for(folder: Path) -> str:
    """Returns the `setup` of `tests.serve.conftest.serving`; the logs are stored below `folder`."""
    logs = folder / "logs"
    logs.mkdir(mode=0o700)
    return OWN_FILE_SYSTEMS.format(shm=SHM_BYTES, log=LOG_BYTES, logs=os.fsencode(logs))


def may_mount() -> bool:
    """Returns whether this user may mount separate file systems: in a container, root often may
    not."""
    code = OWN_FILE_SYSTEMS.format(shm=1 << 20, log=1 << 20, logs=b"/tmp")
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def command_of(pid: int) -> str:
    return _said_of(pid, "cmdline")


def name_of(pid: int) -> str:
    return _said_of(pid, "comm").strip()


def _said_of(pid: int, file: str) -> str:
    try:
        return Path(f"/proc/{pid}/{file}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def parts(cluster: Cluster) -> dict[int, str]:
    """Maps the pid of every process of the cluster, orphans included, to its part."""
    found = {cluster.process.pid: "launcher"}
    below = descendants(cluster.process.pid)
    config = f"{cluster.temporary}/"
    for pid in (int(path.name) for path in Path("/proc").glob("[1-9]*")):
        command = command_of(pid)
        if alive(pid) and pid not in found and (pid in below or config in command):
            named = (part for text, part in PARTS.items() if text in command)
            found[pid] = FORKED.get(name_of(pid)) or next(named, "other")
    return found


class Striker:
    """Applies faults. `strike` returns when the fault itself is over, not when the cluster has
    recovered. Blocks: call it from a thread."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.config: ClusterConfig = read_resolved(cluster.run_dir / "cluster.json")

    def strike(self, fault: Fault) -> str:
        """Applies the fault; returns its target for the journal. Retries while another fault blocks
        Redis, which none does for long."""
        until_s = time.monotonic() + _REDIS_S
        while True:
            try:
                return str(getattr(self, f"_{fault.kind}")(fault))
            except redis.RedisError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.05)

    def root(self) -> Path:
        """Returns the root of the file systems as the cluster sees them."""
        return Path(f"/proc/{self.cluster.process.pid}/root")

    def _kill(self, fault: Fault) -> str:
        pid = self._one(fault)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return f"pid {pid}"

    def _stop(self, fault: Fault) -> str:
        pid = self._one(fault)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(fault.length_s)
            os.kill(pid, signal.SIGCONT)
        return f"pid {pid}"

    def _one(self, fault: Fault) -> int:
        """Returns a process of that part; waits while there is none, as between death and
        restart."""
        while True:
            pids = sorted(p for p, part in parts(self.cluster).items() if part == fault.target)
            if pids:
                return pids[int(fault.pick * len(pids))]
            time.sleep(0.05)

    def _flush(self, _: Fault) -> str:
        with self.redis() as client:
            client.flushall()
        return "FLUSHALL"

    def _partition(self, fault: Fault) -> str:
        """Drops connections to Redis, pauses Redis, or removes a socket's file."""
        if fault.target == "sockets":
            names = sorted(p.name for p in Path(self.config.run_dir).iterdir() if p.is_socket())
            name = names[int(fault.pick * len(names))]
            (Path(self.config.run_dir) / name).unlink(missing_ok=True)
            return f"removed {name}"
        with self.redis() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            if fault.length_s:
                client.execute_command("CLIENT", "PAUSE", int(fault.length_s * 1000), "ALL")
        time.sleep(fault.length_s)
        return "connections dropped"

    def _fill(self, fault: Fault) -> str:
        """Fills one of the cluster's own file systems, or Redis's memory."""
        if fault.target == "redis":
            return self._fill_redis()
        folder = {"shm": self.root() / "dev/shm", "logs": self.logs()}[fault.target]
        path, size_bytes = folder / "filler", 0
        with path.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                size_bytes += file.write(bytes(1 << 16))
        time.sleep(_FULL_S)
        path.unlink()
        return f"{size_bytes >> 10} KiB"

    def _fill_redis(self) -> str:
        with self.redis() as client:
            client.config_set("maxmemory", 1)
            time.sleep(_FULL_S)
            with suppress(redis.ConnectionError):  # it was replaced meanwhile, and is well
                client.config_set("maxmemory", 0)
        return "maxmemory 1"

    def logs(self) -> Path:
        """Returns the folder of the logs."""
        return self.root() / os.path.realpath(self.cluster.run_dir / "logs").lstrip("/")

    def _corrupt(self, fault: Fault) -> str:
        """Sends malformed messages to every socket, or adds malformed entries to the queues."""
        if fault.target == "sockets":
            with zmq.Context() as context:
                for path in self.cluster.run_dir.iterdir():
                    if path.is_socket():
                        self._send_garbage(context, path)
            return "every socket"
        body = Random(fault.pick).randbytes(200)
        with self.redis() as client:
            for queue in (*(d.name for d in self.config.devices), "unplaced"):
                key = f"{self.config.namespace}:queue:{queue}"
                entry = {"id": f"garbage-{fault.pick}", "model": "a", "attempt": 1, "body": body}
                client.xadd(key, entry)
        return "an entry in every queue"

    def _send_garbage(self, context: zmq.Context[zmq.Socket[bytes]], path: Path) -> None:
        for kind in (zmq.PUSH, zmq.DEALER):
            with context.socket(kind) as peer:
                peer.setsockopt(zmq.LINGER, 500)
                peer.connect(f"ipc://{path}")
                for frame in GARBAGE:
                    with suppress(zmq.ZMQError):
                        peer.send(frame, zmq.NOBLOCK)

    @contextmanager
    def redis(self) -> Iterator[redis.Redis]:
        """Waits for a server that answers."""
        with redis.Redis.from_url(self.config.redis_url, socket_timeout=5) as client:
            while True:
                try:
                    client.ping()
                    break
                except redis.RedisError:
                    time.sleep(0.05)
            yield client


# Keys that exist from their first use, each of bounded size.
_COME_WITH_USE = ("malformed", "queue:", "left:", "begun:")


def census(cluster: Cluster, striker: Striker) -> dict[str, object]:
    """Returns values that must be the same before and after, without requests and with empty
    caches."""
    cluster.operate("flush")
    status = cluster.operate("status", "--json")
    if status.returncode != 0:
        return {"status": status.stderr}
    agents = json.loads(status.stdout)["agents"]
    with striker.redis() as client:
        prefix = f"{striker.config.namespace}:"
        keys = sorted(k.decode().removeprefix(prefix) for k in client.scan_iter(f"{prefix}*"))
        waiting = sum(client.xlen(prefix + k) for k in keys if k.startswith("queue:"))
        open_requests = client.hlen(f"{prefix}open")
    shm = striker.root() / "dev/shm"
    return {
        "processes": Counter(parts(cluster).values()),
        "models": sorted(m["model"] for agent in agents for m in agent["models"]),
        "reserved bytes": sum(agent["reserved_bytes"] for agent in agents),
        "keys": [_unnumbered(k) for k in keys if not k.startswith(_COME_WITH_USE)],
        "requests": open_requests + waiting,
        # without the weight store, which is a cache
        "segments": sorted(
            path.relative_to(shm).as_posix()
            for names in ("prism-kvcached.*", "*-moves/**/*")
            for path in shm.glob(names)
            if path.is_file() and striker.config.namespace in path.as_posix()
        ),
        "files": sorted(
            _unnumbered(path.name)
            for path in cluster.run_dir.iterdir()
            if path.name != "troubles.json"
        ),
        "troubles": read_troubles(cluster.run_dir),
        "launcher's descriptors": len(os.listdir(f"/proc/{cluster.process.pid}/fd")),
    }


def _unnumbered(name: str) -> str:
    """Removes the number of a frontend or an engine, which changes after its death."""
    return re.sub(r"(frontend.f\d+)\.\d+", r"\1", re.sub(r"ranks-.*", "ranks", name))
