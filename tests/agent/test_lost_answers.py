"""Redis admits requests and the answer is lost: each still runs once, or is gone if unwanted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection

import pytest

from prism.agent import queue as agent_queue
from prism.agent.queue import QueueReader
from prism.agent.serving import Serving
from prism.agent.sockets import TokenSender
from prism.agent.state import AgentTiming
from prism.errors import QueueUnavailableError
from prism.messages.engine import Submit
from prism.queueing import BundledRedis, RequestQueue
from tests.agent.bench import Bench
from tests.queueing.requests import request

DEVICE = "host:0"


class LossyQueue(RequestQueue):
    """The answer to the first admission does not arrive."""

    lost = False

    async def admit(self, device: str, epoch: int, entry_ids: Collection[str]) -> set[str]:
        admitted = await super().admit(device, epoch, entry_ids)
        if admitted and not self.lost:
            self.lost = True
            raise QueueUnavailableError("the connection broke")
        return admitted


class Desk:
    """Serving with a real queue; engines are `bench.sent`."""

    def __init__(self, bench: Bench, queue: LossyQueue) -> None:
        self.bench, self.queue, self.epoch, self.is_stale = bench, queue, 0, False
        self.tokens = TokenSender(lambda name: f"ipc:///nowhere/{name}", lambda _: None)
        self.serving = Serving(
            state=bench.state,
            views=bench.views,
            reclaimer=bench.reclaimer,
            queue=queue,
            device=DEVICE,
            engines=bench.sent,  # type: ignore[arg-type]
            tokens=self.tokens,
            wake=lambda: None,
            missed=self.missed,
            headroom_tokens=64,
        )

    def missed(self, model: str) -> None:
        assert model == "a"
        self.is_stale = True

    async def replay(self) -> None:
        """What the intake does after an outage, and where it was asked to."""
        entries = await self.queue.read(DEVICE, "0", 0)
        for entry_id, waiting in entries:
            self.serving.arrived(entry_id, waiting)
        self.serving.replayed({entry_id for entry_id, _ in entries})

    async def lose_an_answer(self) -> None:
        await self.queue.enqueue(request("1"))
        await self.replay()
        with pytest.raises(QueueUnavailableError):
            await self.serving.turn(self.epoch)

    @property
    def submitted(self) -> list[str]:
        orders = [m for _, m in self.bench.sent.messages if isinstance(m, Submit)]
        return [each.id for order in orders for each in order.requests]


@pytest.fixture
async def desk(redis_server: BundledRedis, namespace: str, bench: Bench) -> AsyncIterator[Desk]:
    queue = LossyQueue.connect(redis_server.url, namespace)
    await queue.route("a", DEVICE)
    desk = Desk(bench, queue)
    desk.epoch = await queue.acquire(DEVICE, "agent", 30)
    yield desk
    desk.tokens.close()
    await queue.close()


@pytest.mark.parametrize("replay_first", [True, False])
async def test_it_runs_once(desk: Desk, replay_first: bool) -> None:
    await desk.lose_an_answer()
    if replay_first:
        await desk.replay()
    for _ in range(3):
        await desk.serving.turn(desk.epoch)
        await desk.replay()
    assert desk.submitted == ["1"]
    assert desk.bench.state.requests.running_ids() == {"1"}


async def test_it_goes_where_its_model_went(desk: Desk) -> None:
    await desk.lose_an_answer()
    desk.serving.hand_back({"a"})
    await desk.queue.route("a")
    await desk.serving.turn(desk.epoch)
    assert await desk.queue.unplaced_counts() == {"a": 1}


@pytest.mark.parametrize("who", ["client", "frontend"])
async def test_nobody_wants_it_any_more(desk: Desk, who: str) -> None:
    await desk.lose_an_answer()
    if who == "client":
        desk.serving.cancel(["1"])
    else:
        desk.serving.frontend_died("f0")
    await desk.serving.turn(desk.epoch)
    await desk.queue.acquire(DEVICE, "agent", 30)  # what runs there would wait again
    assert await desk.queue.depth(DEVICE) == 0
    assert desk.submitted == []


async def test_what_left_for_another_copy_no_longer_counts_as_waiting(desk: Desk) -> None:
    """The agent of a device that stays is not told: the first that it cannot admit says it."""
    desk.queue.lost = True  # no more answers
    for number in range(60):
        await desk.queue.enqueue(request(str(number)))
    await desk.replay()
    assert await desk.queue.route("a", DEVICE, *(f"host:{i}" for i in range(1, 20))) == 57
    waiting = desk.bench.state.requests.waiting_counts
    assert waiting()["a"] == 60
    await desk.serving.turn(desk.epoch)
    assert desk.is_stale
    await desk.replay()
    assert waiting()["a"] == await desk.queue.depth(DEVICE) == 3 - len(desk.submitted)


async def test_a_cancelled_one_that_left_is_no_sign_of_others(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.queue.lost = True
    await desk.queue.enqueue(request("1"))
    await desk.replay()
    admit = desk.queue.admit

    async def cancelled_first(device: str, epoch: int, entry_ids: Collection[str]) -> set[str]:
        await desk.queue.forget(["1"])
        desk.serving.cancel(["1"])
        return await admit(device, epoch, entry_ids)

    monkeypatch.setattr(desk.queue, "admit", cancelled_first)
    await desk.serving.turn(desk.epoch)
    assert not desk.bench.state.requests.waiting()
    assert not desk.is_stale


async def test_what_left_a_moment_ago_makes_no_second_reading(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue of thousands is read once for all that left it, not once for each."""
    readings, replayed = [], asyncio.Event()
    monkeypatch.setattr(agent_queue, "BLOCK_S", 0.01)
    monkeypatch.setattr(agent_queue, "REFRESH_S", 1000.0)

    def note(entries: Collection[str]) -> None:
        readings.append(entries)
        replayed.set()

    async def nothing(_: object) -> None: ...

    reader = QueueReader(
        desk.queue,
        DEVICE,
        AgentTiming(),
        on_entry=lambda *_: None,
        on_replayed=note,
        set_aside=nothing,
    )
    task = asyncio.create_task(reader.run())
    await replayed.wait()
    for _ in range(10):
        reader.refresh()
        await asyncio.sleep(0.02)
    assert len(readings) == 1
    monkeypatch.setattr(agent_queue, "REFRESH_S", 0.0)
    replayed.clear()
    await asyncio.wait_for(replayed.wait(), 30)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
