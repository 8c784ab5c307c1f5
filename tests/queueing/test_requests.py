"""The request queue against a real server: each request is in exactly one place."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec
import pytest

from prism.errors import LeaseLostError, MalformedRequestError
from prism.messages.cluster import ClusterStatus
from prism.messages.requests import Resume
from prism.queueing import UNPLACED, BundledRedis, RequestQueue, request_queue
from tests.queueing.requests import request

DEVICE, OTHER = "host:0", "host:1"
TTL_S = 30.0


async def waiting(queue: RequestQueue, device: str) -> list[str]:
    return [request.id for _, request in await queue.read(device, "0")]


async def entries(queue: RequestQueue, device: str) -> list[str]:
    return [entry for entry, _ in await queue.read(device, "0")]


async def test_goes_where_its_model_is_placed(queue: RequestQueue) -> None:
    assert await queue.enqueue(request("1")) == UNPLACED
    assert await queue.route("a", DEVICE) == 1
    assert await queue.enqueue(request("2")) == DEVICE
    assert await queue.enqueue(request("3", "b")) == UNPLACED
    assert await waiting(queue, DEVICE) == ["1", "2"]
    assert await queue.unplaced_counts() == {"b": 1}
    assert await queue.placement() == {"a": (DEVICE,)}


async def test_a_burst_waits_for_connections(queue: RequestQueue) -> None:
    await asyncio.gather(*(queue.enqueue(request(str(number))) for number in range(1000)))
    assert await queue.unplaced_counts() == {"a": 1000}


async def test_a_read_request_is_the_one_sent(queue: RequestQueue) -> None:
    sent = request("1", prompt_tokens=300, attempt=3)
    await queue.enqueue(sent)
    assert [r for _, r in await queue.read(UNPLACED, "0")] == [sent]


async def test_enqueue_is_idempotent_and_newer_attempts_replace(queue: RequestQueue) -> None:
    for attempt in (1, 1, 2, 1, 2):
        await queue.enqueue(request("1", attempt=attempt))
    assert [r.attempt for _, r in await queue.read(UNPLACED, "0")] == [2]


async def test_several_are_enqueued_in_order(queue: RequestQueue) -> None:
    """Adds each as if it came alone: to its model's place, known ones once, newer attempts anew."""
    await queue.route("b", DEVICE)
    await queue.enqueue(request("1", attempt=2))
    await queue.enqueue(request("2"))
    several = [request("3"), request("1"), request("4", "b"), request("2", attempt=2)]
    queues = [UNPLACED, UNPLACED, DEVICE, UNPLACED]
    for _ in range(2):
        assert await queue.enqueue_all(several) == queues
    assert [(r.id, r.attempt) for _, r in await queue.read(UNPLACED, "0")] == [
        ("1", 2), ("3", 1), ("2", 2)
    ]  # fmt: skip
    assert await waiting(queue, DEVICE) == ["4"]
    assert await queue.enqueue_all([]) == []


async def test_a_newer_attempt_replaces_a_running_one(queue: RequestQueue) -> None:
    await queue.route("a", DEVICE)
    await queue.enqueue(request("1"))
    epoch = await queue.acquire(DEVICE, "agent", TTL_S)
    await queue.admit(DEVICE, epoch, await entries(queue, DEVICE))
    await queue.enqueue(request("1", attempt=2))
    await queue.finish(DEVICE, epoch, ["1"])  # of the older attempt: must not remove the newer
    assert await waiting(queue, DEVICE) == ["1"]


async def test_moves_forth_and_back_in_order(queue: RequestQueue) -> None:
    for n in range(600):
        await queue.enqueue(request(str(n), "ab"[n % 2]))
    assert await queue.route("a", DEVICE) == 300
    assert await queue.route("a", OTHER) == 300
    assert await queue.depth(DEVICE) == 0
    assert [r.id for _, r in await queue.read(OTHER, "0", count=300)] == [
        str(n) for n in range(0, 600, 2)
    ]
    assert await queue.route("a") == 300
    assert await queue.unplaced_counts() == {"a": 300, "b": 300}


async def test_admitted_once_and_gone_when_finished(queue: RequestQueue) -> None:
    await queue.route("a", DEVICE)
    await queue.enqueue(request("1"))
    epoch = await queue.acquire(DEVICE, "agent", TTL_S)
    waiting_entries = await entries(queue, DEVICE)
    assert await queue.admit(DEVICE, epoch, [*waiting_entries, "1-1"]) == set(waiting_entries)
    assert await queue.depth(DEVICE) == 0
    # The answer to the first call may have been lost, so a second call returns the same.
    assert await queue.admit(DEVICE, epoch, waiting_entries) == set(waiting_entries)
    await queue.finish(DEVICE, epoch, ["1", "unknown"])
    assert await queue.admit(DEVICE, epoch, waiting_entries) == set()
    assert await queue.acquire(DEVICE, "agent", TTL_S) > epoch
    assert await waiting(queue, DEVICE) == []
    assert await queue.enqueue(request("1")) == DEVICE


async def test_requeued_ones_follow_the_placement(queue: RequestQueue) -> None:
    await queue.route("a", DEVICE)
    await queue.enqueue(request("1"))
    epoch = await queue.acquire(DEVICE, "agent", TTL_S)
    await queue.admit(DEVICE, epoch, await entries(queue, DEVICE))
    await queue.route("a", OTHER)
    assert await queue.requeue(DEVICE, epoch, ["1", "1", "unknown"]) == 1
    assert await waiting(queue, OTHER) == ["1"]


async def test_moved_ones_go_on_where_their_model_is(queue: RequestQueue) -> None:
    """Keeps their progress. A request that ended meanwhile does not come back."""
    await queue.route("a", DEVICE)
    for name in ("1", "2"):
        await queue.enqueue(request(name))
    epoch = await queue.acquire(DEVICE, "agent", TTL_S)
    await queue.admit(DEVICE, epoch, await entries(queue, DEVICE))
    await queue.route("a", OTHER)
    await queue.finish(DEVICE, epoch, ["2"])
    resume = Resume([7, 8], "/dev/shm/x", 4)
    moved = [msgspec.structs.replace(request(name), resume=resume) for name in ("1", "2")]
    assert await queue.move(DEVICE, epoch, moved) == 1
    assert await queue.move(DEVICE, epoch, moved) == 0
    assert [r for _, r in await queue.read(OTHER, "0")] == moved[:1]


async def test_handed_back_ones_come_again_with_the_next_route(queue: RequestQueue) -> None:
    await queue.route("a", DEVICE)
    await queue.enqueue(request("1"))
    epoch = await queue.acquire(DEVICE, "agent", TTL_S)
    assert await queue.unplace(DEVICE, epoch, await entries(queue, DEVICE)) == 1
    assert (await queue.unplaced_counts(), await queue.depth(DEVICE)) == ({"a": 1}, 0)
    assert await queue.route("a", DEVICE) == 1
    assert await waiting(queue, DEVICE) == ["1"]


async def test_forget_drops_waiting_ones_only(queue: RequestQueue) -> None:
    await queue.route("a", DEVICE)
    await queue.enqueue(request("run"))
    epoch = await queue.acquire(DEVICE, "agent", TTL_S)
    await queue.admit(DEVICE, epoch, await entries(queue, DEVICE))
    await queue.enqueue(request("wait"))
    await queue.enqueue(request("else", "b"))
    assert await queue.forget(["run", "wait", "else", "unknown"]) == {"wait", "else"}
    assert await queue.depth(DEVICE) == 0
    assert await queue.unplaced_counts() == {}
    assert await queue.requeue(DEVICE, epoch, ["run"]) == 1


async def test_two_agents_fight_for_a_lease(redis_server: BundledRedis, namespace: str) -> None:
    queues = [RequestQueue.connect(redis_server.url, namespace) for _ in range(8)]
    takes = [queue.acquire(DEVICE, f"agent{n}", TTL_S) for n, queue in enumerate(queues)]
    outcomes = await asyncio.gather(*takes, return_exceptions=True)
    epochs = [outcome for outcome in outcomes if isinstance(outcome, int)]
    assert len(epochs) == 1
    assert sum(isinstance(outcome, LeaseLostError) for outcome in outcomes) == 7
    for queue in queues:
        await queue.close()


async def test_the_older_holder_can_change_nothing(queue: RequestQueue) -> None:
    await queue.route("a", DEVICE)
    await queue.enqueue(request("1"))
    await queue.enqueue(request("2"))
    first, second = await entries(queue, DEVICE)
    old = await queue.acquire(DEVICE, "old", 0.05)
    assert await queue.admit(DEVICE, old, [first]) == {first}
    await asyncio.sleep(0.1)
    new = await queue.acquire(DEVICE, "new", TTL_S)
    assert sorted(await waiting(queue, DEVICE)) == ["1", "2"]  # "1" waits again
    with pytest.raises(LeaseLostError, match="host:0"):
        await queue.admit(DEVICE, old, [second])
    with pytest.raises(LeaseLostError):
        await queue.finish(DEVICE, old, ["1"])
    with pytest.raises(LeaseLostError):
        await queue.requeue(DEVICE, old, ["1"])
    with pytest.raises(LeaseLostError):
        await queue.unplace(DEVICE, old, [second])
    with pytest.raises(LeaseLostError):
        await queue.renew(DEVICE, "old", old, TTL_S)
    await queue.release(DEVICE, "old", old)
    await queue.renew(DEVICE, "new", new, TTL_S)
    with pytest.raises(LeaseLostError, match="held by new"):
        await queue.acquire(DEVICE, "old", TTL_S)


async def test_an_agent_that_lost_the_queue_to_another_one_is_notified(queue: RequestQueue) -> None:
    """Refuses the holder of an expired lease if another agent has held the queue since."""
    old = await queue.acquire(DEVICE, "old", 0.02)
    await asyncio.sleep(0.05)
    again = await queue.acquire(DEVICE, "old", TTL_S, since_epoch=old)
    await queue.release(DEVICE, "old", again)
    other = await queue.acquire(DEVICE, "other", TTL_S)
    await queue.release(DEVICE, "other", other)
    with pytest.raises(LeaseLostError, match="another agent since epoch"):
        await queue.acquire(DEVICE, "old", TTL_S, since_epoch=again)
    assert await queue.acquire(DEVICE, "new", TTL_S) > other


async def test_a_lease_that_ran_out_unseen_is_still_ours(queue: RequestQueue) -> None:
    epoch = await queue.acquire(DEVICE, "agent", 0.02)
    await asyncio.sleep(0.05)
    await queue.renew(DEVICE, "agent", epoch, TTL_S)
    with pytest.raises(LeaseLostError, match="held by agent"):
        await queue.acquire(DEVICE, "other", TTL_S)


async def test_released_lease_is_free_at_once(queue: RequestQueue) -> None:
    epoch = await queue.acquire(DEVICE, "first", TTL_S)
    await queue.release(DEVICE, "first", epoch)
    assert await queue.acquire(DEVICE, "second", TTL_S) > epoch


async def test_restart_recovers_all_but_those_kept(queue: RequestQueue) -> None:
    await queue.route("a", DEVICE)
    for n in range(4):
        await queue.enqueue(request(str(n)))
    epoch = await queue.acquire(DEVICE, "agent", TTL_S)
    await queue.admit(DEVICE, epoch, await entries(queue, DEVICE))
    await queue.acquire(DEVICE, "agent", TTL_S, keep=["1", "3"])
    assert sorted(await waiting(queue, DEVICE)) == ["0", "2"]


async def test_route_while_being_admitted_leaves_one_place(
    redis_server: BundledRedis, namespace: str
) -> None:
    """Moves a model to and fro while two agents admit what they see."""
    scheduler, *agents = (RequestQueue.connect(redis_server.url, namespace) for _ in range(3))
    total, rng = 200, random.Random(7)
    epochs = [await agents[n].acquire(f"host:{n}", f"agent{n}", TTL_S) for n in (0, 1)]
    ran: list[str] = []

    async def serve(n: int) -> None:
        device, cursor = f"host:{n}", "0"
        while len(ran) < total:
            seen, _ = await agents[n].follow(device, cursor, "0", 0.01, count=16)
            if seen:
                cursor = seen[-1][0]
            await asyncio.sleep(rng.random() * 0.003)
            admitted = await agents[n].admit(device, epochs[n], [entry for entry, _ in seen])
            done = [request.id for entry, request in seen if entry in admitted]
            ran.extend(done)
            await agents[n].finish(device, epochs[n], done)

    async def schedule() -> None:
        for n in range(total):
            await scheduler.enqueue(request(str(n)))
            if n % 3 == 0:
                await scheduler.route(
                    "a", *rng.choice([(), ("host:0",), ("host:1",), ("host:0", "host:1")])
                )
        await scheduler.route("a", "host:1")

    await asyncio.wait_for(asyncio.gather(schedule(), serve(0), serve(1)), 60)
    assert sorted(ran) == sorted(str(n) for n in range(total))
    for queue in (scheduler, *agents):
        assert await queue.unplaced_counts() == {}
        await queue.close()


async def test_wait_unplaced_reports_arrivals_once(queue: RequestQueue) -> None:
    cursor, counts = await queue.wait_unplaced("0", 0.01)
    assert counts == {}
    waiter = asyncio.create_task(queue.wait_unplaced(cursor, 5))
    await queue.enqueue(request("1"))
    cursor, counts = await waiter
    assert counts == {"a": 1}
    await queue.enqueue(request("2"))
    await queue.enqueue(request("3", "b"))
    cursor, counts = await queue.wait_unplaced(cursor, 5)
    assert counts == {"a": 1, "b": 1}
    assert (await queue.wait_unplaced(cursor, 0.01))[1] == {}


async def test_heartbeats_run_out(queue: RequestQueue) -> None:
    await queue.beat("f0", 30)
    await queue.beat("f1", 0.01)
    await asyncio.sleep(0.05)
    assert await queue.live_frontends(["f0", "f1", "f2"]) == {"f0"}
    assert await queue.live_frontends([]) == set()


async def test_a_dead_frontend_leaves_nothing_unplaced(queue: RequestQueue) -> None:
    for number in range(3):
        await queue.enqueue(request(str(number), frontend_id=f"f0.{number % 2}"))
    await queue._redis.xadd(queue._prefix + "queue:unplaced", {"id": "x", "model": "a"})
    await queue.beat("f0.0", 30)
    assert await queue.remove_frontend("f0.0") == 2
    assert await queue.remove_frontend("f0.0") == 0
    assert await queue.open_attempts(["0", "1", "2"]) == {"1": 1}
    assert await queue.live_frontends(["f0.0"]) == set()


async def test_status_round_trip(queue: RequestQueue) -> None:
    assert await queue.status() is None
    status = ClusterStatus(time_unix_s=1.0, policy="prism", placement={"a": DEVICE}, agents=[])
    await queue.publish_status(status)
    assert await queue.status() == status


async def test_namespaces_do_not_meet(redis_server: BundledRedis, queue: RequestQueue) -> None:
    other = RequestQueue.connect(redis_server.url, "another")
    await queue.route("a", DEVICE)
    assert await other.placement() == {}
    await other.close()


async def test_the_incarnation_changes_when_the_data_is_lost(queue: RequestQueue) -> None:
    first = await queue.beat("f0", 30)
    assert await queue.beat("f1", 30) == first
    await queue._redis.delete(queue._prefix + "incarnation")
    assert await queue.beat("f1", 30) != first


async def test_what_runs_is_registered_unless_it_is_newer_or_runs_elsewhere(
    queue: RequestQueue,
) -> None:
    await queue.route("a", DEVICE)
    epoch = await queue.acquire(DEVICE, "agent", TTL_S)
    for number, attempt in (("waits", 1), ("newer", 2)):
        await queue.enqueue(request(number, attempt=attempt))
    running = [request("waits"), request("newer"), request("unknown")]
    for _ in range(2):
        await queue.register(DEVICE, epoch, running)
    assert [r.id for _, r in await queue.read(DEVICE, "0")] == ["newer"]
    await queue.acquire(DEVICE, "agent", TTL_S, keep=["waits"])
    waiting = {(r.id, r.attempt) for _, r in await queue.read(DEVICE, "0")}
    assert waiting == {("newer", 2), ("unknown", 1)}


async def test_an_entry_is_discarded_and_a_newer_attempt_stays(queue: RequestQueue) -> None:
    await queue.route("a", DEVICE)
    epoch = await queue.acquire(DEVICE, "agent", TTL_S)
    await queue.enqueue(request("1"))
    ((entry, _),) = await queue.read(DEVICE, "0")
    await queue.enqueue(request("1", attempt=2))
    await queue.discard(DEVICE, epoch, [entry])
    ((newer, waiting),) = await queue.read(DEVICE, "0")
    assert waiting.attempt == 2
    assert await queue.forget_attempts({"1": 1}) == set()
    await queue.discard(DEVICE, epoch, [newer])
    assert await queue.read(DEVICE, "0") == []
    assert await queue.open_attempts(["1"]) == {}


async def test_entries_that_are_no_requests_are_set_aside(queue: RequestQueue) -> None:
    await queue.route("a", DEVICE)
    epoch = await queue.acquire(DEVICE, "agent", TTL_S)
    await queue.beat("f7", 30)
    await queue.enqueue(request("1"))
    await queue._run("enqueue", 2, 1000, "broken", "a", 2, b"\xc1 no request", "")
    await queue._redis.xadd(queue._key("queue", DEVICE), {"of": "a stranger"})
    with pytest.raises(MalformedRequestError) as caught:
        await queue.read(DEVICE, "0")
    assert sorted(caught.value.entries.values()) == [("", 0), ("broken", 2)]
    assert await queue.set_aside(DEVICE, epoch, caught.value.entries) == {"f7"}
    assert [r.id for _, r in await queue.read(DEVICE, "0")] == ["1"]
    assert await queue.open_attempts(["broken", "1"]) == {"1": 1}
    assert await queue._redis.xlen(queue._prefix + "malformed") == 2


async def test_frontends_whose_heartbeat_ran_out_are_not_named(queue: RequestQueue) -> None:
    epoch = await queue.acquire(DEVICE, "agent", TTL_S)
    for name in ("dead", "f7"):
        await queue.beat(name, 30)
    await queue._redis.delete(queue._key("frontend", "dead"))
    assert await queue.set_aside(DEVICE, epoch, ["1-1"]) == {"f7"}
    assert await queue._redis.smembers(queue._prefix + "frontends") == {b"f7"}


def test_no_script_walks_all_keys_of_a_shared_server() -> None:
    scripts = Path(request_queue.__file__).parent.glob("*.lua")
    assert not [s.name for s in scripts if "'KEYS'" in s.read_text() or "'SCAN'" in s.read_text()]
