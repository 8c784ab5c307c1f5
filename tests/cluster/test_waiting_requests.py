"""Mirror of the unplaced queue, against a real server."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from prism.cluster.state.waiting_requests import WaitingRequests
from prism.queueing import UNPLACED, RequestQueue
from tests.cluster.conftest import Cluster

pytestmark = pytest.mark.slow


@pytest.fixture
def queue(cluster: Cluster) -> RequestQueue:
    return cluster.queue


@pytest.fixture
def mirror() -> WaitingRequests:
    return WaitingRequests(lambda model: 7.0)


async def send(cluster: Cluster, *models: str) -> Sequence[str]:
    requests = [cluster.request(model) for model in models]
    await cluster.queue.enqueue_all(requests)
    return [request.id for request in requests]


async def test_times_are_on_the_callers_clock(cluster: Cluster, mirror: WaitingRequests) -> None:
    """Keeps no prompts, only their lengths."""
    await send(cluster, "a")
    await mirror.read(cluster.queue, [], now_s=5.0)
    [found] = mirror.of(["a"])
    assert (found.model, found.prompt_tokens, found.output_tokens) == ("a", 3, 7.0)
    assert found.deadline_s - found.arrival_s == pytest.approx(1.0)
    assert found.arrival_s < 5.0
    assert mirror.of(["b"]) == ()


async def test_cancelled_and_repeated_requests_are_forgotten(
    cluster: Cluster, queue: RequestQueue, mirror: WaitingRequests
) -> None:
    ids = await send(cluster, *"aab")
    await mirror.read(queue, [], 0.0)
    assert mirror.counts() == {"a": 2, "b": 1}
    await queue.forget(ids[:1])
    await mirror.read(queue, [], 0.0)
    await mirror.prune(queue)
    assert mirror.counts() == {"a": 1, "b": 1}


async def test_what_was_bound_counts_on_its_device(
    cluster: Cluster, queue: RequestQueue, mirror: WaitingRequests
) -> None:
    """Ignores requests that are not known, and those whose model is not there."""
    await send(cluster, *"ab")
    await queue.route("a", "host:0")
    await mirror.read(queue, ["host:0"], 0.0)
    entries = [waiting.id for waiting in mirror.of(["a", "b"])]
    await mirror.bind(queue, "host:0", [*entries, "1-0"])
    assert mirror.open == {"host:0": 1}
    assert mirror.counts() == {"b": 1}
    assert await queue.depth("host:0") == 1


async def test_all_is_read_again_after_a_loss_of_data(
    cluster: Cluster, queue: RequestQueue, mirror: WaitingRequests
) -> None:
    """Covers a server with an earlier clock than the last one: its entries have smaller ids."""
    key = queue._key("queue", UNPLACED)
    await queue._redis.xadd(key, {"id": "x", "body": b"junk"}, id="9999999999999-0")
    await mirror.read(queue, [], 0.0)
    assert mirror.malformed == ["9999999999999-0"]
    await queue._redis.delete(key)
    await send(cluster, *"aaa")
    for _ in range(2):
        await mirror.read(queue, [], 0.0)
        await mirror.prune(queue)
    await mirror.read(queue, [], 0.0)
    assert mirror.counts() == {"a": 3}
    assert mirror.malformed == []


async def test_as_many_other_entries_are_noticed_when_one_starts(
    cluster: Cluster, queue: RequestQueue, mirror: WaitingRequests
) -> None:
    await send(cluster, *"aa")
    await mirror.read(queue, [], 0.0)
    stale = [waiting.id for waiting in mirror.of(["a"])]
    await queue._redis.delete(queue._key("queue", UNPLACED))
    for number in (1, 2):
        body = msgspec.msgpack.encode(cluster.request("b"))
        fields = {"id": f"x{number}", "model": "b", "attempt": "1", "body": body}
        await queue._redis.xadd(queue._key("queue", UNPLACED), fields, id=f"{number}-0")
    await queue._redis.delete(queue._prefix + "open")
    await mirror.read(queue, [], 0.0)
    assert mirror.counts() == {"a": 2}
    await mirror.bind(queue, "host:0", stale)
    for _ in range(2):
        await mirror.prune(queue)
        await mirror.read(queue, [], 0.0)
    assert mirror.counts() == {"b": 2}


async def test_what_is_not_a_request_goes_to_an_agent(
    queue: RequestQueue, mirror: WaitingRequests
) -> None:
    fields = {"id": "x", "model": "a", "attempt": "1", "body": b"junk"}
    await queue._redis.xadd(queue._key("queue", UNPLACED), fields)
    await mirror.read(queue, [], 0.0)
    await mirror.bind_malformed(queue, "host:0")
    assert await queue.depth("host:0") == 1
    await mirror.read(queue, [], 0.0)
    assert (mirror.malformed, mirror.counts()) == ([], {})
