"""Redis admits requests and the answer is lost: each still runs once, or ends if cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection

import msgspec
import pytest
from msgspec import structs

from prism.agent.network.sockets import OutputBatch, TokenSender
from prism.agent.requests.admission import Admission
from prism.agent.requests.arrivals import Arrivals
from prism.agent.requests.queue import OrphanedRequests, QueueReader
from prism.agent.requests.running import RunningRequests
from prism.agent.state.device_state import AgentTiming
from prism.errors import QueueUnavailableError
from prism.messages.engine import Submit
from prism.messages.image_tensors import PromptImage, Tensor, Tensors
from prism.messages.requests import Failure, Request
from prism.queueing import BundledRedis, RequestQueue
from prism.transport import ENGINE_MESSAGE_BYTES_MAX
from tests.agent.bench import Bench
from tests.queueing.requests import request

DEVICE = "host:0"


class LossyQueue(RequestQueue):
    """Queue that loses the answer to the first admission."""

    lost = False

    async def admit(self, device: str, epoch: int, entry_ids: Collection[str]) -> set[str]:
        admitted = await super().admit(device, epoch, entry_ids)
        if admitted and not self.lost:
            self.lost = True
            raise QueueUnavailableError("the connection broke")
        return admitted


class Desk:
    """Requests with a real queue and `bench.sent` as engines."""

    def __init__(self, bench: Bench, queue: LossyQueue) -> None:
        self.bench, self.queue, self.epoch = bench, queue, 0
        self.tokens = TokenSender(lambda name: f"ipc:///nowhere/{name}", lambda _: None)
        running = RunningRequests(
            bench.state,
            device=DEVICE,
            engines=bench.sent,  # type: ignore[arg-type]
            tokens=self.tokens,
            headroom_tokens=64,
            send_kv=lambda requests, target, go_on: None,
        )
        self.arrivals = Arrivals(bench.state.requests, running, self.tokens)
        self.orphans = OrphanedRequests(bench.state)
        self.admission = Admission(
            bench.state,
            views=bench.views,
            reclaimer=bench.reclaimer,
            queue=queue,
            device=DEVICE,
            running=running,
        )

    async def replay(self) -> None:
        """Replays the queue, as the intake does after an outage and on demand."""
        entries = await self.queue.read(DEVICE, "0")
        for entry_id, waiting in entries:
            self.arrivals.arrived(entry_id, waiting)
        self.arrivals.replayed({entry_id for entry_id, _ in entries})

    async def lose_an_answer(self) -> None:
        await self.queue.enqueue(request("1"))
        await self.replay()
        with pytest.raises(QueueUnavailableError):
            await self.admission.step(self.epoch)

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
        await desk.admission.step(desk.epoch)
        await desk.replay()
    assert desk.submitted == ["1"]
    assert desk.bench.state.requests.running_ids() == {"1"}


async def test_it_goes_where_its_model_went(desk: Desk) -> None:
    await desk.lose_an_answer()
    desk.orphans.unplace({"a"})
    await desk.queue.route("a")
    await desk.admission.step(desk.epoch)
    assert await desk.queue.unplaced_counts() == {"a": 1}


@pytest.mark.parametrize("who", ["client", "frontend"])
async def test_nobody_wants_it_any_more(desk: Desk, who: str) -> None:
    await desk.lose_an_answer()
    if who == "client":
        desk.arrivals.cancel(["1"])
    else:
        desk.arrivals.frontend_died("f0")
    await desk.admission.step(desk.epoch)
    await desk.queue.acquire(DEVICE, "agent", 30)  # what runs there would wait again
    assert await desk.queue.depth(DEVICE) == 0
    assert desk.submitted == []


async def test_what_left_for_another_copy_no_longer_counts_as_waiting(desk: Desk) -> None:
    """Wakes the reader of a device that keeps the model, although no request arrives."""
    desk.queue.lost = True  # no more answers

    async def nothing(_: object) -> None: ...

    reader = QueueReader(
        desk.queue,
        DEVICE,
        AgentTiming(),
        on_entry=desk.arrivals.arrived,
        on_replayed=desk.arrivals.replayed,
        set_aside=nothing,
    )
    for number in range(60):
        await desk.queue.enqueue(request(str(number)))
    waiting = desk.bench.state.requests.waiting_counts

    async def wait_for(count: int) -> None:
        async with asyncio.timeout(30):
            while waiting().get("a", 0) != count:
                await asyncio.sleep(0.001)

    task = asyncio.create_task(reader.run())
    await wait_for(60)
    assert await desk.queue.route("a", DEVICE, *(f"host:{i}" for i in range(1, 20))) == 57
    await wait_for(3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def failures_of(batch: OutputBatch) -> list[Failure]:
    return [failure for output in batch.outputs.values() for failure in output.failures]


async def test_images_come_with_the_request(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails an attempt whose images Redis has no more, so that its frontend sends them again."""
    sent: list[Failure] = []
    monkeypatch.setattr(desk.tokens, "send", lambda batch: sent.extend(failures_of(batch)))
    desk.queue.lost = True  # no more answers
    tensors = {"pixel_values": Tensor("float32", (1,), b"1234")}
    image = PromptImage("a" * 64, ((0, 3),))
    await desk.queue.store_images({image.digest: tensors})
    with_image = structs.replace(request("1"), images=(image,))
    without = structs.replace(request("2"), images=(structs.replace(image, digest="b" * 64),))
    await desk.queue.enqueue_all([with_image, without])
    await desk.replay()
    await desk.admission.step(desk.epoch)
    [order] = [m for _, m in desk.bench.sent.messages if isinstance(m, Submit)]
    assert (order.requests, order.images) == ([with_image], {image.digest: tensors})
    assert [(f.request_id, f.code, f.retryable) for f in sent] == [("2", "images_lost", True)]
    assert desk.bench.state.requests.running_ids() == {"1"}
    await desk.admission.step(desk.epoch)
    assert await desk.queue.open_attempts(["1", "2"]) == {"1": 1}


async def test_images_are_in_messages_that_engines_take(desk: Desk) -> None:
    """Sends no message that would end the connection, and so the engine."""
    desk.queue.lost = True  # no more answers
    images = {
        digest * 64: {"pixel_values": Tensor("uint8", (1,), digest.encode() * (40 << 20))}
        for digest in "abc"
    }
    await desk.queue.store_images(images)
    await desk.queue.enqueue_all([shown("text")])
    await desk.queue.enqueue_all([shown(f"a{number}", "a") for number in range(4)])
    await desk.queue.enqueue_all([shown("b", "b"), shown("bc", "b", "c"), shown("c", "c")])
    await desk.replay()
    await desk.admission.step(desk.epoch)
    orders = [m for _, m in desk.bench.sent.messages if isinstance(m, Submit)]
    sizes = [len(msgspec.msgpack.encode(order)) for order in orders]
    assert max(sizes) < ENGINE_MESSAGE_BYTES_MAX // 2
    together = {each.id: number for number, order in enumerate(orders) for each in order.requests}
    assert len(together) == 8
    assert len({together[f"a{number}"] for number in range(4)}) == 1
    assert len({together[name] for name in ("a0", "b", "c")}) == 3
    for order in orders:
        for each in order.requests:
            full = each.with_tensors(order.images)
            assert all(image.tensors == images[image.digest] for image in full.images)


async def test_requests_wait_again_if_their_images_cannot_be_read(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.queue.lost = True  # no more answers
    await desk.queue.store_images({"b" * 64: {}})
    await desk.queue.enqueue_all([shown("text"), shown("b", "b")])
    await desk.replay()

    async def fail(_: object) -> dict[str, Tensors]:
        raise QueueUnavailableError("the connection broke")

    with monkeypatch.context() as patch:
        patch.setattr(desk.queue, "images", fail)
        with pytest.raises(QueueUnavailableError):
            await desk.admission.step(desk.epoch)
    for _ in range(3):
        await desk.replay()
        await desk.admission.step(desk.epoch)
    assert sorted(desk.submitted) == ["b", "text"]


def shown(request_id: str, *digests: str) -> Request:
    images = tuple(PromptImage(each * 64, ((0, 0),)) for each in digests)
    return structs.replace(request(request_id), images=images)
