"""The agent as the process that prism-serve starts."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.agent.harness import DEVICE, World, until


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def start(this: World, device: str = DEVICE) -> asyncio.subprocess.Process:
    path = Path(this.config.run_dir) / "cluster.json"
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "prism.agent",
        "--config",
        str(path),
        "--device",
        device,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_sigterm_drains_and_leaves_nothing(agent_world: World) -> None:
    process = await start(agent_world)
    await agent_world.scheduler.ready()
    assert (await agent_world.scheduler.activate("a")).ok
    await agent_world.queue.route("a", DEVICE)
    requests = await agent_world.frontend.send(4, max_tokens=150)
    await until(lambda: all(agent_world.frontend.stream(r.id).chunks for r in requests))
    pids = [client.pid for client in agent_world.device.usage().clients]
    assert len(pids) == 2
    process.send_signal(signal.SIGTERM)
    await agent_world.frontend.finish(requests)
    assert await asyncio.wait_for(process.wait(), 30) == 0
    assert not living(pids)
    left = set(os.listdir(agent_world.config.run_dir))
    assert left <= {"cluster.json", "logs", "scheduler", "frontend-f0"}


async def test_killed_agent_takes_its_engines_along_and_the_next_one_recovers(
    agent_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No request may end before the kill, however late that comes.
    monkeypatch.setenv("PRISM_FAKE", '{"decode_step_ms": 20, "prefill_tokens_per_s": 50000}')
    process = await start(agent_world)
    await agent_world.scheduler.ready()
    assert (await agent_world.scheduler.activate("a")).ok
    await agent_world.queue.route("a", DEVICE)
    requests = await agent_world.frontend.send(3, max_tokens=400)
    await until(lambda: all(agent_world.frontend.stream(r.id).chunks for r in requests))
    pids = [client.pid for client in agent_world.device.usage().clients]
    process.kill()
    await process.wait()
    await until(lambda: not living(pids))
    agent_world.frontend.streams.clear()  # the same attempts run again, from their start
    agent_world.scheduler.reports.clear()
    second = await start(agent_world)
    await agent_world.scheduler.ready()
    assert (await agent_world.scheduler.activate("a")).ok
    await agent_world.frontend.finish(requests)
    second.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(second.wait(), 30) == 0


async def test_unknown_device_is_a_clear_error(agent_world: World) -> None:
    process = await start(agent_world, "host:7")
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"host:7 is not in the configuration; its devices: host:0" in errors
