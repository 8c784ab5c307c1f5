"""However a cluster ends, it leaves nothing."""

from __future__ import annotations

import asyncio
import json
import signal
import stat
from pathlib import Path

import httpx
import pytest

import kvcached
from prism.config.resolved import read_resolved
from prism.config.schema.cluster_config import ClusterConfig
from tests.serve.conftest import Cluster, alive, serving, until

SLOW = json.dumps({"decode_step_ms": 20})


def segments(config: ClusterConfig) -> list[Path]:
    return [kvcached.segment_path(d.name, config.namespace) for d in config.devices]


def check_nothing_left(cluster: Cluster, config: ClusterConfig) -> None:
    until(lambda: not any(alive(pid) for pid in cluster.pids), "the end of all children")
    assert not any(path.exists() for path in segments(config))
    assert list(cluster.temporary.iterdir()) == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{cluster.url}/health")


async def tokens_of_a_stream(cluster: Cluster) -> tuple[list[int], str | None]:
    """Begins a stream, sends SIGTERM after its first token, and reads the stream to its end."""
    body = {"model": "a", "prompt": [5], "max_tokens": 60, "ignore_eos": True, "stream": True}
    ids: list[int] = []
    reason = None
    async with (
        httpx.AsyncClient(base_url=cluster.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json={**body, "return_token_ids": True}) as got,
    ):
        async for line in got.aiter_lines():
            if not line.startswith("data: {"):
                continue
            if not ids:
                cluster.process.send_signal(signal.SIGTERM)
            event = json.loads(line.removeprefix("data: "))
            ids += event["choices"][0]["token_ids"]
            reason = event["choices"][0]["finish_reason"]
    return ids, reason


def test_sigterm_finishes_what_runs_and_leaves_nothing(tmp_path: Path, short_dir: Path) -> None:
    with serving(tmp_path, short_dir, SLOW) as cluster:
        config = read_resolved(cluster.run_dir / "cluster.json")
        assert all(path.exists() for path in segments(config))
        ids, reason = asyncio.run(tokens_of_a_stream(cluster))
        assert (len(ids), reason) == (60, "length")
        assert cluster.process.wait(60) == 0
        check_nothing_left(cluster, config)
        logs = list((tmp_path / "logs").glob("*.log"))
        assert {"frontend-f0.log", "scheduler.log"} <= {path.name for path in logs}
        assert {stat.S_IMODE(path.stat().st_mode) for path in logs} == {0o600}


def test_a_second_interrupt_ends_at_once(tmp_path: Path, short_dir: Path) -> None:
    with serving(tmp_path, short_dir, json.dumps({"decode_step_ms": 5000})) as cluster:
        config = read_resolved(cluster.run_dir / "cluster.json")
        body = {"model": "a", "prompt": [5], "max_tokens": 100, "ignore_eos": True}
        with pytest.raises(httpx.TransportError):
            asyncio.run(interrupted_post(cluster, body))
        assert cluster.process.wait(60) == 0
        check_nothing_left(cluster, config)


async def interrupted_post(cluster: Cluster, body: dict[str, object]) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
        posted = asyncio.create_task(client.post("/v1/completions", json=body))
        await asyncio.sleep(0.5)
        cluster.process.send_signal(signal.SIGINT)
        await asyncio.sleep(0.5)
        assert not posted.done()
        cluster.process.send_signal(signal.SIGINT)
        await posted


def test_after_kill_9_children_end_and_the_next_start_sweeps(
    tmp_path: Path, short_dir: Path
) -> None:
    with serving(tmp_path, short_dir) as cluster:
        config = read_resolved(cluster.run_dir / "cluster.json")
        cluster.stop(signal.SIGKILL)
        until(lambda: not any(alive(pid) for pid in cluster.pids), "the end of all children")
        stale = cluster.run_dir
    with serving(tmp_path, short_dir) as again:
        assert not stale.exists()
        assert not any(path.exists() for path in segments(config))
        assert again.post().status_code == 200
