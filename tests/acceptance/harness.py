"""Real `prism-serve` processes, clients to them, and measurements by the OS."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
MODELS = Path(os.environ.get("PRISM_TEST_MODELS", ROOT / ".cache" / "models"))
START_S = 240.0
# One client for all polls: `httpx.get` reads the CA certificates at each call, 20 ms of CPU.
HTTP = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))


def model_yaml(name: str, **overrides: Any) -> dict[str, Any]:
    return {"name": name, "path": str(MODELS / name), "context_length": 512, **overrides}


def cluster_yaml(
    models: Sequence[dict[str, Any]],
    devices: Sequence[dict[str, Any]],
    **overrides: Any,
) -> dict[str, Any]:
    return {"devices": list(devices), "models": list(models), **overrides}


@dataclass
class Answer:
    """One streamed completion as the client saw it."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    token_times_s: list[float] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)


class Cluster:
    """A running prism-serve and a client to it."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, run_dir: Path, log: Path):
        self.process, self.url, self.run_dir, self.log = process, url, run_dir, log

    def status(self) -> dict[str, Any]:
        return dict(HTTP.get(f"{self.url}/status", timeout=10).raise_for_status().json())

    def agents(self) -> list[dict[str, Any]]:
        return list(self.status()["agents"])

    def model_report(self, model: str) -> dict[str, Any] | None:
        reports = [m for agent in self.agents() for m in agent["models"] if m["model"] == model]
        return reports[0] if reports else None

    def operate(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs `prism-serve ARGUMENTS` on this cluster's run directory."""
        command = [prism_serve(), *arguments, "--run-dir", str(self.run_dir)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not happen in {timeout_s} s\n{self.tail()}")
            time.sleep(0.1)

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def prism_serve() -> str:
    return str(Path(sys.executable).parent / "prism-serve")


def is_ready(url: str) -> bool:
    try:
        return HTTP.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def serving(config: dict[str, Any], directory: Path) -> Iterator[Cluster]:
    """Runs `prism-serve` on a free port until the block ends; checks that nothing remains."""
    port = free_port()
    config = {**config, "frontend": {**config.get("frontend", {}), "port": port}}
    path = directory / "prism.yaml"
    path.write_text(yaml.safe_dump(config))
    run_dir = Path(f"/tmp/prism-test-{os.getpid()}-{port}")
    log = directory / "serve.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [prism_serve(), "--config", str(path), "--run-dir", str(run_dir)],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    cluster = Cluster(process, f"http://127.0.0.1:{port}", run_dir, log)
    try:
        wait_ready(cluster)
        yield cluster
    finally:
        stop(cluster)


def wait_ready(cluster: Cluster) -> None:
    deadline = time.monotonic() + START_S
    while not is_ready(cluster.url):
        if cluster.process.poll() is not None:
            raise RuntimeError(f"prism-serve exited {cluster.process.returncode}\n{cluster.tail()}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"prism-serve is not ready after {START_S} s\n{cluster.tail()}")
        time.sleep(0.2)


def stop(cluster: Cluster, timeout_s: float = 60) -> None:
    cluster.process.send_signal(signal.SIGTERM)
    try:
        cluster.process.wait(timeout_s)
    finally:
        if cluster.process.poll() is None:
            cluster.process.kill()


async def complete(
    client: httpx.AsyncClient,
    model: str,
    prompt: Sequence[int] | str,
    max_tokens: int,
    **extra: Any,
) -> Answer:
    """Returns one greedy streamed completion, with an error of the server in `Answer.error`."""
    body = {
        "model": model,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **extra,
    }
    answer = Answer()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            answer.error = json.loads(await response.aread())["error"]
            return answer
        async for event in sse_events(response):
            take_event(answer, event)
    return answer


async def sse_events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def take_event(answer: Answer, event: dict[str, Any]) -> None:
    answer.error = event.get("error", answer.error)
    answer.usage = event.get("usage") or answer.usage
    for choice in event.get("choices", []):
        ids = choice.get("token_ids") or []
        answer.ids += ids
        answer.text += choice.get("text", "")
        answer.token_times_s += [time.monotonic()] * len(ids)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def async_client(cluster: Cluster) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=cluster.url, timeout=600, limits=limits)


def complete_all(cluster: Cluster, jobs: Sequence[tuple[str, Sequence[int], int]]) -> list[Answer]:
    """Runs all jobs (model, prompt ids, max_tokens) at once; returns answers in the jobs' order."""

    async def run() -> list[Answer]:
        async with async_client(cluster) as client:
            return list(await asyncio.gather(*(complete(client, *job) for job in jobs)))

    return asyncio.run(run())


def descendants(pid: int) -> list[int]:
    """Returns the ids of the processes below `pid`."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parent = parent_of(int(entry.name))
            children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def parent_of(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(fields[1])


def memfd_resident_bytes(pids: Sequence[int]) -> int:
    """Returns the bytes that the OS holds for these processes' memory files (memfd), each file
    once."""
    blocks: dict[tuple[int, int], int] = {}
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                if "/memfd:" not in os.readlink(fd):
                    continue
                stat = fd.stat()
            except (FileNotFoundError, PermissionError, ProcessLookupError):
                continue
            blocks[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return sum(blocks.values())
