"""/health, /status and /metrics render what the scheduler published."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from prism.messages.agent import AgentReport, ModelReport
from prism.messages.cluster import ClusterStatus
from prism.messages.troubles import read_troubles, write_troubles
from prism.transport import malformed_total
from tests.frontend.conftest import Stack
from tests.frontend.scripted_agent import answering


def published(**changes: Any) -> ClusterStatus:
    model = ModelReport("base", "active", waiting=3, kv_mapped_bytes=4096, maps_total=11)
    agent = AgentReport(
        device="host:0",
        epoch=1,
        time_unix_s=time.time(),
        capacity_bytes=1 << 26,
        page_bytes=1 << 16,
        reserved_bytes=5 << 16,
        committed_bytes=2 << 16,
        resident_bytes=1 << 16,
        engines_free=1,
        engines_starting=0,
        engines_total=2,
        models=[model],
    )
    status = ClusterStatus(
        time_unix_s=time.time(),
        policy="prism",
        placement={"base": "host:0"},
        agents=[agent],
        kvpr={"host:0": 0.25},
        unplaced={"chat": 2},
        actions_total={"activate": 4},
        ready=True,
    )
    return msgspec.structs.replace(status, **changes)


async def test_health_follows_the_status(stack: Stack) -> None:
    async def reason() -> str | None:
        response = await stack.client.get("/health")
        assert response.status_code == (200 if response.json()["status"] == "ready" else 503)
        return response.json().get("reason")

    queue = stack.services.queue
    assert await reason() == "starting: the cluster scheduler has not reported yet"
    await queue.publish_status(published(ready=False))
    assert await reason() == "starting: host:0: engines 2/2 up, base active"
    await queue.publish_status(published(ready=False, agents=[]))
    assert await reason() == "starting: host:0: no agent yet"
    await queue.publish_status(published())
    assert await reason() is None
    await queue.publish_status(published(time_unix_s=time.time() - 60, ready=False))
    assert "has not reported for 60 s" in str(await reason())


async def test_a_silent_scheduler_or_part_leaves_a_ready_cluster_degraded(stack: Stack) -> None:
    async def degraded() -> dict[str, str]:
        response = await stack.client.get("/health")
        assert response.status_code == 200
        found: dict[str, str] = response.json().get("degraded", {})
        return found

    queue, run_dir = stack.services.queue, Path(stack.services.config.run_dir)
    old = published(time_unix_s=time.time() - 60, degraded={"host:1": "its agent does not report"})
    await queue.publish_status(old)
    found = await degraded()
    assert "has not reported for 6" in found.pop("scheduler")
    assert found == old.degraded
    write_troubles(run_dir, {"scheduler": "ended (signal SIGKILL); it is started again"})
    assert await degraded() == old.degraded | read_troubles(run_dir)
    write_troubles(run_dir, {})
    await queue.publish_status(published())
    assert await degraded() == {}


async def test_status_has_every_field(stack: Stack) -> None:
    assert (await stack.client.get("/status")).status_code == 503
    await stack.services.queue.publish_status(published())
    status = (await stack.client.get("/status")).json()
    assert status["ready"] is True
    assert status["agents"][0]["engine_restarts_total"] == 0
    assert status["agents"][0]["models"][0]["running"] == 0
    assert msgspec.convert(status, ClusterStatus).agents[0].models[0].maps_total == 11


async def test_metrics(stack: Stack) -> None:
    stack.agent.script = answering([7, 8, 0])
    await stack.client.post("/v1/completions", json={"model": "base", "prompt": [9, 9]})
    await stack.services.queue.publish_status(published())
    dropped = float(malformed_total())  # of this process, whatever test it was in
    lines = (await stack.client.get("/metrics")).text.splitlines()
    for line in (
        'prism_requests_total{frontend="f0",model="base",outcome="ok"} 1.0',
        'prism_prompt_tokens_total{frontend="f0",model="base"} 2.0',
        'prism_output_tokens_total{frontend="f0",model="base"} 3.0',
        'prism_ttft_seconds_count{frontend="f0",model="base"} 1.0',
        'prism_slo_total{frontend="f0",met="true",model="base",slo="ttft"} 1.0',
        'prism_open_requests{frontend="f0",model="base"} 0.0',
        f'prism_malformed_messages_total{{frontend="f0",process="frontend"}} {dropped}',
        'prism_malformed_messages_total{process="scheduler"} 0.0',
        "prism_cluster_ready 1.0",
        'prism_placement{device="host:0",model="base"} 1.0',
        'prism_device_resident_bytes{device="host:0"} 65536.0',
        'prism_model_kv_mapped_bytes{device="host:0",model="base"} 4096.0',
        'prism_model_maps_total{device="host:0",model="base"} 11.0',
        'prism_queue_depth{device="host:0"} 3.0',
        'prism_unplaced_requests{model="chat"} 2.0',
        'prism_kvpr{device="host:0"} 0.25',
        'prism_actions_total{action="activate"} 4.0',
    ):
        assert line in lines
    heads = [line for line in lines if line.startswith("#")]
    assert len(heads) == len(set(heads))
