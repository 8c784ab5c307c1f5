"""A configuration that changes while the scheduler runs."""

from __future__ import annotations

import msgspec

from prism.messages.cluster import ClusterStatus, FrontendState
from tests.cluster.conftest import Cluster, spec
from tests.cluster.scripted import eventually

TTL_S = 60.0


async def followed(cluster: Cluster) -> ClusterStatus:
    """Returns the status once all processes use the current configuration."""

    async def found() -> ClusterStatus | None:
        status = await cluster.status()
        return status if status.revision == cluster.config.revision else None

    return await eventually(found)


async def test_a_removed_model_leaves_when_its_last_request_has(cluster: Cluster) -> None:
    """Restarts the scheduler meanwhile."""
    cluster.configure(spec("a"), spec("b"), rooms=(2.0,))
    await cluster.start()
    await cluster.queue.beat("f0", TTL_S, FrontendState(0))
    await cluster.queue.beat("f1", TTL_S, FrontendState(1))
    cluster.reload(spec("a"))

    async def known() -> bool:
        return (await cluster.status()).leaving == ["b"]

    await eventually(known)
    assert (await cluster.status()).revision == 0, "f0 serves b still"
    await cluster.queue.beat("f0", TTL_S, FrontendState(1, ["b"]))
    await followed(cluster)
    await cluster.stop_scheduler()
    cluster.start_scheduler()
    await cluster.serves("b")
    assert cluster.active() == {"host:0": {"a", "b"}}
    await cluster.queue.beat("f0", TTL_S, FrontendState(1))
    await eventually(lambda: cluster.active() == {"host:0": {"a"}})

    async def forgotten() -> bool:
        return not (await cluster.status()).leaving

    await eventually(forgotten)
    assert await cluster.queue.placement() == {"a": ("host:0",)}


async def test_a_removed_model_comes_up_for_requests_that_wait(cluster: Cluster) -> None:
    cluster.configure(spec("a"), spec("b", never_evict=True), rooms=(1.0,))
    await cluster.start()
    assert cluster.active() == {"host:0": {"b"}}
    await cluster.queue.beat("f0", TTL_S, FrontendState(1, ["a"]))
    await cluster.send("a")
    cluster.reload(spec("b", never_evict=True))
    await followed(cluster)
    assert not cluster.finished("a")
    cluster.reload(spec("b"))
    await cluster.queue.beat("f0", TTL_S, FrontendState(2, ["a"]))
    await eventually(lambda: cluster.finished("a"))


async def test_a_new_model_comes_up_and_changed_ones_keep_what_is_known(cluster: Cluster) -> None:
    cluster.configure(spec("a"), rooms=(2.0,))
    await cluster.start()
    await cluster.serves("a")
    before = await cluster.status()
    cluster.reload(spec("a", never_evict=True), spec("c"))
    await eventually(lambda: cluster.active() == {"host:0": {"a", "c"}})
    await followed(cluster)

    async def counted_on() -> bool:
        now = (await cluster.status()).actions_total["activate"]
        return now == before.actions_total["activate"] + 1

    await eventually(counted_on)
    refused = await cluster.command("evict", model="a")
    assert "a has never_evict" in refused.message


async def test_a_model_that_is_back_may_have_other_files(cluster: Cluster) -> None:
    """Checks that the old model was evicted and that its size is not used."""
    cluster.configure(spec("a"), spec("b"), rooms=(3.0,))
    await cluster.start()
    cluster.reload(spec("a"))
    await eventually(lambda: cluster.active() == {"host:0": {"a"}})
    cluster.config = msgspec.structs.replace(cluster.config, leaving=[])
    cluster.reload(spec("a"), spec("b", path="/elsewhere", weight_bytes=2 * 40960))
    await cluster.serves("b")
    assert cluster.agents["host:0"].residents["b"].need_bytes == 98304


async def test_requests_of_an_unknown_model_are_refused_by_name(cluster: Cluster) -> None:
    """Simulates a frontend that was suspended during the removal of a model."""
    cluster.configure(spec("a"))
    await cluster.start()
    assert await cluster.send("z") == "unplaced"

    async def refused() -> bool:
        refusals = (await cluster.status()).refusals
        return refusals == {"z": "it was removed from the configuration"}

    await eventually(refused)
