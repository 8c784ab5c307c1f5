"""Copies of a model share its requests, against a real server."""

from __future__ import annotations

import asyncio
import uuid
from types import SimpleNamespace
from typing import Any

import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from prism.messages.image_tensors import PromptImage
from prism.messages.prompt_prefix import (
    PREFIX_KEPT_S,
    PREFIX_TOKENS,
    SLACK_REQUESTS,
    prefix_hash,
)
from prism.messages.requests import Request, Resume
from prism.queueing import BundledRedis, RequestQueue
from prism_sim.cluster.copies import SimModel
from tests.queueing.requests import request
from tests.queueing.test_requests import DEVICE, OTHER, TTL_S, entries, waiting


async def test_of_several_copies_the_one_with_least_to_do_gets_a_request(
    queue: RequestQueue,
) -> None:
    """Counts running requests until they end or wait elsewhere."""
    await queue.route("b", OTHER)
    await queue.enqueue(request("other", "b"))
    await queue.route("a", DEVICE, OTHER)
    assert await queue.placement() == {"a": (DEVICE, OTHER), "b": (OTHER,)}
    assert await queue.placement("c", "a") == {"a": (DEVICE, OTHER)}
    assert [await queue.enqueue(request(str(n))) for n in range(4)] == [DEVICE, OTHER] * 2
    epoch = await queue.acquire(DEVICE, "agent", TTL_S)
    await queue.admit(DEVICE, epoch, await entries(queue, DEVICE))
    assert await queue.enqueue(request("4")) == DEVICE
    await queue.finish(DEVICE, epoch, ["0", "2", "2"])
    assert [await queue.enqueue(request(n)) for n in "567"] == [DEVICE, DEVICE, OTHER]
    assert await queue.forget(["1", "3"]) == {"1", "3"}
    assert await queue.enqueue(request("7", attempt=2)) == OTHER


async def test_moved_ones_go_where_their_kv_is_if_a_copy_is_there(queue: RequestQueue) -> None:
    """Prefers that copy however many other requests it has."""
    await queue.route("a", DEVICE)
    names = [str(number) for number in range(6)]
    for name in names:
        await queue.enqueue(request(name))
    epoch = await queue.acquire(DEVICE, "agent", TTL_S)
    await queue.admit(DEVICE, epoch, await entries(queue, DEVICE))
    await queue.route("a", OTHER, "third")
    for device, some in (("third", names[:4]), ("gone", names[4:])):
        resume = Resume([7, 8], "/dev/shm/x", 4, kv_device=device)
        moved = [structs.replace(request(name), resume=resume) for name in some]
        assert await queue.move(DEVICE, epoch, moved) == len(some)
    assert await waiting(queue, "third") == names[:4]
    assert await waiting(queue, OTHER) == names[4:]


async def test_a_copy_that_joins_shares_what_waits_and_one_that_leaves_gives_it_up(
    queue: RequestQueue,
) -> None:
    await queue.route("a", DEVICE)
    for n in range(600):
        await queue.enqueue(request(str(n)))
    assert await queue.route("a", DEVICE, OTHER) == 300
    assert await queue.route("a", DEVICE, OTHER) == 0
    assert (await queue.depth(DEVICE), await queue.depth(OTHER)) == (300, 300)
    assert await queue.route("a", OTHER) == 300
    assert (await queue.depth(DEVICE), await queue.depth(OTHER)) == (0, 600)
    assert await queue.route("a") == 600


async def test_a_copy_that_joins_gets_every_other_one_and_the_first_one_is_notified(
    queue: RequestQueue,
) -> None:
    """Splits by age, so that both copies are equally late, and admits nothing in vain."""
    await queue.route("a", DEVICE)
    for n in range(4):
        await queue.enqueue(request(str(n)))
    epoch = await queue.acquire(DEVICE, "agent", TTL_S)
    await queue.admit(DEVICE, epoch, (await entries(queue, DEVICE))[:2])
    for n in range(4, 8):
        await queue.enqueue(request(str(n)))
    _, quiet = await queue.follow(DEVICE, "0", "0", 0)
    await queue.route("a", DEVICE, OTHER)
    assert await waiting(queue, OTHER) == ["2", "3", "5", "7"]
    assert await waiting(queue, DEVICE) == ["4", "6"]
    cursor = (await entries(queue, DEVICE))[-1]
    none, told = await queue.follow(DEVICE, cursor, quiet, 5)
    assert (none, await queue.follow(DEVICE, cursor, told, 0)) == ([], ([], told))
    assert told != quiet


async def test_whoever_joins_third_shares_by_age_not_by_device(queue: RequestQueue) -> None:
    await queue.route("a", DEVICE, OTHER)
    for n in range(6):
        await queue.enqueue(request(str(n)))
        await asyncio.sleep(0.002)  # requests that reach two devices in one ms are of one age
    await queue.route("a", DEVICE, OTHER, "host:2")
    shares = [await waiting(queue, device) for device in (DEVICE, OTHER, "host:2")]
    assert shares == [["0", "3"], ["1", "4"], ["2", "5"]]


def prompt(id: str, begins: int, *, tokens: int = PREFIX_TOKENS + 9, lora: str = "") -> Request:
    """Returns a request. Prompts with the same `begins` differ only in their last token."""
    ids = [begins] * (tokens - 1) + [uuid.uuid4().int % 9999]
    return structs.replace(request(id), prompt_ids=ids, lora=lora)


async def test_prompts_that_begin_alike_go_to_one_copy_up_to_the_slack(
    queue: RequestQueue,
) -> None:
    await queue.route("a", DEVICE, OTHER)
    alike = [await queue.enqueue(prompt(str(n), 1)) for n in range(SLACK_REQUESTS + 3)]
    assert alike == [DEVICE] * (SLACK_REQUESTS + 1) + [OTHER] * 2
    assert await queue.enqueue(prompt("other", 2)) == OTHER, "no beginning yet: least to do"
    assert await queue.forget([str(n) for n in range(9)]) == {str(n) for n in range(len(alike))}
    assert await queue.enqueue(prompt("again", 1)) == OTHER, "where it was last"
    assert await queue.enqueue(prompt("adapter", 1, lora="x")) == DEVICE, "has a cache of its own"
    assert await queue.enqueue(prompt("1", 1)) == OTHER
    await queue.route("a", DEVICE, "host:3")
    assert len(await queue.forget(["other", "again", "adapter", "1"])) == 4
    assert await queue.enqueue(prompt("new", 1)) == DEVICE, "the copy that had it is gone"


async def test_short_prompts_and_those_of_one_copy_are_not_remembered(
    queue: RequestQueue, redis_server: BundledRedis, namespace: str
) -> None:
    with redis.Redis.from_url(redis_server.url) as server:
        await queue.route("a", DEVICE)
        await queue.enqueue(prompt("0", 1))
        await queue.route("a", DEVICE, OTHER)
        short = [prompt(str(n), 1, tokens=PREFIX_TOKENS - 1) for n in range(1, 4)]
        assert [await queue.enqueue(each) for each in short] == [OTHER, DEVICE, OTHER]
        assert not server.keys(f"{namespace}:begun:*")
        await queue.enqueue(prompt("9", 1))
        (key,) = server.keys(f"{namespace}:begun:*")
        assert 0 < server.pttl(key) <= PREFIX_KEPT_S * 1000


class Copies:
    """The simulator's model, with copies that only count."""

    def __init__(self, devices: list[str]) -> None:
        self.of: dict[str, Any] = {
            name: SimpleNamespace(
                home=SimpleNamespace(name=name), open_requests=0, takes_requests=True
            )
            for name in devices
        }
        setup: Any = None
        self.model = SimModel(setup, list(self.of.values()))

    def enqueue(self, begins: int) -> str:
        copy = self.model.copy_for([begins, begins, 7] if begins else [], 0.0)
        assert copy is not None
        self.of[copy.home.name].open_requests += 1
        return copy.home.name


@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.sampled_from(["come", "come", "end"]), st.sampled_from([0, 1, 1, 1, 2, 3])),
        min_size=10,
        max_size=60,
    ),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
async def test_the_simulator_chooses_the_same_copies(
    redis_server: BundledRedis, copies: int, steps: list[tuple[str, int]]
) -> None:
    """Reads `begins` 0 as a short prompt."""
    queue = RequestQueue.connect(redis_server.url, uuid.uuid4().hex)
    devices = [f"host:{n}" for n in range(copies)]
    simulated, open_at = Copies(devices), dict[str, str]()
    await queue.route("a", *devices)
    for number, (what, begins) in enumerate(steps):
        if what == "come":
            tokens = PREFIX_TOKENS + 1 if begins else 9
            found = await queue.enqueue(prompt(str(number), begins, tokens=tokens))
            assert found == simulated.enqueue(begins)
            open_at[str(number)] = found
        elif open_at:
            ended = sorted(open_at)[begins % len(open_at)]
            assert await queue.forget([ended]) == {ended}
            simulated.of[open_at.pop(ended)].open_requests -= 1
    await queue.close()


def test_images_after_the_prefix_do_not_change_its_hash() -> None:
    def hashed(*places: int) -> str:
        images = tuple(PromptImage(str(place), ((place, place + 3),)) for place in places)
        ids = list(range(PREFIX_TOKENS + 50))
        return prefix_hash(structs.replace(request("0"), prompt_ids=ids, images=images))

    assert hashed(8) == hashed(8, PREFIX_TOKENS + 10)
    assert hashed(8) != hashed()
