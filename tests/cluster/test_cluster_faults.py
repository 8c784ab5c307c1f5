"""The scheduler's process in bad times: failed activations, restarts, lost agents and engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from prism.config.resolved import write_resolved
from prism.messages.agent import ActionResult
from prism.messages.troubles import write_troubles
from tests.cluster.conftest import Cluster, spec
from tests.cluster.scripted import eventually

pytestmark = pytest.mark.slow


async def test_a_failed_activation_is_retried_with_a_pause(cluster: Cluster) -> None:
    cluster.configure(spec("a"), rooms=(1.0,))
    cluster.start_scheduler()
    agent = await cluster.start_agent("host:0", failing={"a": "no such file: weights"})
    await cluster.send("a")

    async def refused() -> bool:
        reason = (await cluster.status()).refusals.get("a", "")
        return "no such file: weights" in reason and "host:0" in reason

    await eventually(refused)
    await eventually(lambda: agent.orders.count(("activate", "a")) >= 3)
    status = await cluster.status()
    assert status.ready, "a model that cannot start does not keep the cluster from serving"
    assert status.actions_total["activate_failed"] >= 2
    agent.failing.clear()
    await eventually(lambda: cluster.finished("a"))

    async def cleared() -> bool:
        return not (await cluster.status()).refusals

    await eventually(cleared)


async def test_a_cluster_whose_only_model_cannot_be_loaded_is_not_ready(cluster: Cluster) -> None:
    cluster.configure(spec("a"), rooms=(1.0,))
    cluster.start_scheduler()
    agent = await cluster.start_agent("host:0", failing={"a": "no such tensor"}, lasting=True)
    await eventually(lambda: agent.orders.count(("activate", "a")) >= 2)
    assert not (await cluster.status()).ready
    agent.failing.clear()

    async def ready() -> bool:
        return (await cluster.status()).ready

    await eventually(ready)


async def test_a_model_that_cannot_be_loaded_keeps_no_other_from_serving(cluster: Cluster) -> None:
    cluster.configure(spec("a"), spec("b"), rooms=(2.0,))
    cluster.start_scheduler()
    await cluster.start_agent("host:0", failing={"a": "no such tensor"}, lasting=True)

    async def ready() -> bool:
        return (await cluster.status()).ready

    await eventually(ready)


async def test_a_failed_activation_is_tried_on_the_other_device(cluster: Cluster) -> None:
    cluster.configure(spec("a"), rooms=(2.0, 1.5))
    cluster.start_scheduler()
    await cluster.start_agent("host:0", failing={"a": "broken"})
    await cluster.start_agent("host:1")
    await cluster.send("a")
    await eventually(lambda: cluster.agents["host:1"].finished["a"])
    assert (await cluster.queue.placement()) == {"a": ("host:1",)}


async def test_requests_of_a_failed_activation_go_back_to_unplaced(cluster: Cluster) -> None:
    cluster.configure(spec("a"), rooms=(1.0,))
    cluster.start_scheduler()
    agent = await cluster.start_agent("host:0", failing={"a": "broken"}, stuck={"a"})
    await eventually(cluster.queue.placement)
    assert await cluster.send("a") == "host:0"
    agent.stuck.clear()

    async def unplaced() -> bool:
        return (await cluster.status()).unplaced == {"a": 1}

    await eventually(unplaced)


# --- the scheduler itself ------------------------------------------------------------------


async def test_a_restarted_scheduler_changes_nothing(cluster: Cluster) -> None:
    cluster.configure(spec("a"), spec("b"), spec("c"), rooms=(2.0, 1.0))
    await cluster.start()
    before, placement = cluster.active(), await cluster.queue.placement()
    orders = list(cluster.orders())
    await cluster.stop_scheduler()
    cluster.start_scheduler()
    for name in "abc":
        await cluster.serves(name)
    await eventually(cluster.ready)
    await asyncio.sleep(0.5)
    assert cluster.active() == before
    assert await cluster.queue.placement() == placement
    assert cluster.orders() == orders


async def test_a_restarted_scheduler_does_not_wait_for_a_dead_agent(cluster: Cluster) -> None:
    """Checks that it is ready with the first report and serves the dead agent's models in time."""
    cluster.configure(spec("a"), spec("b"), rooms=(2.0, 2.0))
    await cluster.start()
    placement = await cluster.queue.placement()
    await cluster.stop_scheduler()
    await cluster.kill_agent(placement["a"][0])
    seen: list[bool] = []

    async def noted() -> bool:
        status = await cluster.status()
        seen.append(status.ready)
        return placement["a"][0] in status.degraded

    cluster.start_scheduler()
    await eventually(noted)
    assert all(seen), "a cluster that serves is ready all the time"
    await cluster.serves("b")
    await cluster.serves("a")


async def test_kill_9_of_the_process_and_sigterm(cluster: Cluster, short_dir: Path) -> None:
    config = cluster.configure(spec("a"), spec("b"), rooms=(2.0,))
    path = short_dir / "cluster.json"
    write_resolved(config, path)

    async def launch() -> asyncio.subprocess.Process:
        command = (sys.executable, "-m", "prism.cluster", "--config", str(path))
        return await asyncio.create_subprocess_exec(*command)

    await cluster.start_agent("host:0")
    process = await launch()
    await eventually(cluster.ready)
    orders = list(cluster.orders())
    os.kill(process.pid, signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL
    assert await cluster.send("a") == "host:0"
    stamp = (await cluster.status()).time_unix_s
    process = await launch()

    async def back() -> bool:
        status = await cluster.status()
        return status.ready and status.time_unix_s > stamp

    await eventually(back)
    await cluster.serves("b")
    assert cluster.orders() == orders
    process.terminate()
    assert await process.wait() == 0


async def test_an_unknown_policy_is_one_line_and_exit_code_2(
    cluster: Cluster, short_dir: Path
) -> None:
    path = short_dir / "cluster.json"
    write_resolved(cluster.configure(spec("a"), policy="fifo"), path)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "prism.cluster", "--config", str(path), stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await process.communicate()
    assert process.returncode == 2
    assert stderr.decode().startswith("policy: 'fifo' is not a policy")
    assert stderr.count(b"\n") == 1


async def test_an_active_model_that_is_not_routed_gets_routed(cluster: Cluster) -> None:
    cluster.configure(spec("a"), rooms=(1.0,))
    await cluster.start()
    await cluster.stop_scheduler()
    await cluster.queue.route("a")
    await cluster.send("a")
    assert cluster.finished("a") == 0
    cluster.start_scheduler()
    await eventually(lambda: cluster.finished("a"))
    assert await cluster.queue.placement() == {"a": ("host:0",)}
    assert cluster.orders() == [("activate", "a")]


async def test_a_second_copy_is_taken_down(cluster: Cluster) -> None:
    """Simulates a scheduler that died in the middle of a migration."""
    cluster.configure(spec("a"), rooms=(1.0, 1.0))
    await cluster.start()
    home = (await cluster.queue.placement())["a"][0]
    other = ({"host:0", "host:1"} - {home}).pop()
    await cluster.stop_scheduler()
    cluster.agents[other].residents["a"] = replace(cluster.agents[home].residents["a"])
    cluster.start_scheduler()
    await eventually(lambda: cluster.active() == {home: {"a"}, other: set()})
    assert (await cluster.queue.placement()) == {"a": (home,)}
    await cluster.serves("a")


async def test_malformed_messages_do_no_harm(cluster: Cluster) -> None:
    cluster.configure(spec("a"))
    await cluster.start()
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    with contextlib.closing(socket):
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(cluster.config.scheduler_endpoint)
        for frame in (b"", b"\xc1\xff", msgspec.msgpack.encode({"type": "Nonsense"})):
            await socket.send(frame)
        await socket.send(msgspec.msgpack.encode(ActionResult(12345, True)))
        await cluster.serves("a")
        assert (await cluster.command("status")).ok
    context.term()


# --- agents and engines --------------------------------------------------------------------


async def test_requests_of_a_lost_agent_go_elsewhere(cluster: Cluster) -> None:
    cluster.configure(spec("a"), spec("b"), rooms=(2.0, 2.0))
    await cluster.start()
    placement = await cluster.queue.placement()
    cluster.agents[placement["a"][0]].serving = False
    assert await cluster.send("a") == placement["a"][0]
    await cluster.kill_agent(placement["a"][0])
    await eventually(lambda: cluster.finished("a"))
    assert set((await cluster.queue.placement()).values()) == {placement["b"]}
    status = await cluster.status()
    assert status.ready, "the other device serves"
    assert status.degraded == {
        placement["a"][0]: "its agent does not report; its models may go elsewhere"
    }


async def test_the_only_agent_lost_is_not_ready(cluster: Cluster) -> None:
    cluster.configure(spec("a"), rooms=(2.0,))
    await cluster.start()
    await cluster.kill_agent("host:0")

    async def unready() -> bool:
        return not (await cluster.status()).ready

    await eventually(unready)
    await cluster.start_agent("host:0")
    await eventually(cluster.ready)
    assert (await cluster.status()).degraded == {}


async def test_a_scheduler_started_while_an_agent_is_lost_is_ready(cluster: Cluster) -> None:
    cluster.configure(spec("a"), spec("b"), rooms=(2.0, 2.0))
    await cluster.start()
    await cluster.kill_agent("host:0")
    await cluster.stop_scheduler()
    cluster.start_scheduler()
    stamp = (await cluster.status()).time_unix_s

    async def ready_again() -> bool:
        status = await cluster.status()
        return status.ready and status.time_unix_s > stamp and bool(status.degraded)

    await eventually(ready_again)


async def test_troubles_that_the_supervisor_sees_are_in_the_status(cluster: Cluster) -> None:
    cluster.configure(spec("a"), rooms=(2.0,))
    await cluster.start()
    write_troubles(Path(cluster.config.run_dir), {"redis": "ended 3 times in a row"})

    async def is_reported() -> bool:
        status = await cluster.status()
        return status.ready and status.degraded == {"redis": "ended 3 times in a row"}

    await eventually(is_reported)


async def test_an_agent_that_hangs_is_lost_and_may_come_back(cluster: Cluster) -> None:
    cluster.configure(spec("a"), spec("b"), rooms=(2.0, 2.0))
    await cluster.start()
    placement = await cluster.queue.placement()
    agent = cluster.agents[placement["a"][0]]
    agent.silent, agent.serving = True, False
    await cluster.send("a")
    await eventually(lambda: cluster.agents[placement["b"][0]].finished["a"])
    agent.silent, agent.serving = False, True
    await eventually(lambda: not agent.residents)
    assert set((await cluster.queue.placement()).values()) == {placement["b"]}
    await eventually(cluster.ready)


async def test_what_a_lost_agent_was_running_is_served_elsewhere(cluster: Cluster) -> None:
    cluster.configure(spec("a"), spec("b"), rooms=(2.0, 2.0))
    await cluster.start()
    home = (await cluster.queue.placement())["a"][0]
    agent = cluster.agents[home]
    agent.serving = False
    await cluster.send("a")
    (entry, request), *_ = await cluster.queue.read(home, "0")
    assert await cluster.queue.admit(home, agent._epoch, [entry])
    await cluster.kill_agent(home)
    await eventually(lambda: cluster.finished("a"))
    assert not await cluster.queue.forget([request.id])


@pytest.mark.parametrize("noticed", [False, True])
async def test_an_agent_that_restarts_gets_its_models_back(cluster: Cluster, noticed: bool) -> None:
    cluster.configure(spec("a"), spec("b"), rooms=(2.0,))
    await cluster.start()
    await cluster.kill_agent("host:0")
    await cluster.send("a")

    async def lost() -> bool:
        return "agent_lost" in (await cluster.status()).actions_total

    if noticed:
        await eventually(lost)
    agent = await cluster.start_agent("host:0")
    await eventually(lambda: agent.active() == {"a", "b"})
    await eventually(lambda: cluster.finished("a"))
    await eventually(cluster.ready)


async def test_an_agent_that_restarts_during_an_activation(cluster: Cluster) -> None:
    cluster.configure(spec("a"), rooms=(1.0,))
    cluster.start_scheduler()
    await cluster.start_agent("host:0", stuck={"a"})
    await eventually(lambda: cluster.orders() == [("activate", "a")])
    await cluster.kill_agent("host:0")
    await cluster.start_agent("host:0")
    await cluster.serves("a")


async def test_a_model_whose_engine_died_comes_back_at_once(cluster: Cluster) -> None:
    cluster.configure(spec("a"), spec("b"), rooms=(2.0,))
    await cluster.start()
    agent = cluster.agents["host:0"]
    agent.delay_s = 0.3
    await agent.lose("a")
    await cluster.serves("a")
    assert agent.active() == {"a", "b"}
    status = await cluster.status()
    assert status.actions_total["lost"] == 1
    assert "activate_failed" not in status.actions_total


async def test_a_model_that_the_agent_revives_is_left_alone(cluster: Cluster) -> None:
    cluster.configure(spec("a"), rooms=(1.0, 1.0))
    await cluster.start()
    home = (await cluster.queue.placement())["a"][0]
    resident = cluster.agents[home].residents["a"]
    resident.state = "activating"
    await cluster.agents[home].report()
    assert await cluster.send("a") == home
    await asyncio.sleep(0.5)
    resident.state = "active"
    await eventually(lambda: cluster.finished("a"))
    assert cluster.orders() == [("activate", "a")]
    assert "lost" not in (await cluster.status()).actions_total


async def test_the_scheduler_outlives_a_redis_that_stops_answering(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prism.errors import QueueUnavailableError
    from prism.queueing.request_queue import RequestQueue

    cluster.configure(spec("a"), spec("b"), rooms=(1.5,))
    await cluster.start()
    real = RequestQueue.placement

    async def gone(self: RequestQueue) -> dict[str, str]:
        raise QueueUnavailableError("Redis does not answer: test")

    monkeypatch.setattr(RequestQueue, "placement", gone)
    absent = ({"a", "b"} - cluster.agents["host:0"].active()).pop()
    await cluster.send(absent)
    await asyncio.sleep(0.8)
    assert len(cluster.orders()) == 1
    monkeypatch.setattr(RequestQueue, "placement", real)
    await eventually(lambda: cluster.finished(absent))
