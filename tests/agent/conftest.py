"""An agent with two engines of the fake adapter, and a bench for its parts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import kvcached
from prism.agent.state.device_state import AgentTiming
from prism.queueing import BundledRedis
from tests.agent.bench import PAGE, QUANTUM, Bench
from tests.agent.harness import World, make_config, world

FAST = AgentTiming(
    lease_ttl_s=1.5,
    tick_s=0.02,
    silent_s=3.0,
    absent_grace_s=0.5,
    failed_grace_s=0.1,
    frontend_check_s=0.1,
    frontend_missing_s=0.5,
    memory_retry_s=0.1,
    fork_retry_s=0.1,
    fork_answer_s=3.0,
)


@pytest.fixture(autouse=True)
def fake_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a step take 2 ms, so that requests still run when a test acts on them."""
    monkeypatch.setenv("PRISM_FAKE", '{"decode_step_ms": 2, "prefill_tokens_per_s": 50000}')


@pytest.fixture
def policy() -> str:
    """Returns the policy, which a test may set as its parameter."""
    return "prism"


@pytest.fixture
async def agent_world(
    redis_server: BundledRedis, short_dir: Path, namespace: str, policy: str
) -> AsyncIterator[World]:
    """Yields a world whose agent is not started yet."""
    config = make_config(short_dir, namespace, redis_server.url, policy=policy)
    async with world(config, FAST) as this:
        yield this


@pytest.fixture
def bench(namespace: str) -> Iterator[Bench]:
    device = kvcached.Device.open(
        "host:0", capacity_bytes=100 * QUANTUM, page_bytes=PAGE, namespace=namespace
    )
    bench = Bench(device)
    yield bench
    for client in bench.clients.values():
        client.close()
    device.destroy()
