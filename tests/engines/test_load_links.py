"""An engine's memory on other GPUs for its loads, in one process with two GPUs of the test libcuda:
when it is taken, and when it is freed."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvcached
from prism.engines.core import EngineContext
from prism.engines.weights.links import IDLE_S, LoadLinks
from prism.messages.model_spec import ModelSpec
from tests.engines.gpus import LINK_BYTES, NAMES, PAGE, Node, config_of, make_model
from tests.kvcached.conftest import libcuda  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("libcuda")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def pair(model: ModelSpec, tmp_path: Path) -> Iterator[tuple[EngineContext, list[kvcached.Device]]]:
    """Yields two GPUs of this process, the second one with room for 24 pages."""
    config = config_of(model, tmp_path, (32 << 20, 24 * PAGE))
    devices = [Node.ledger(config, place) for place in config.devices]
    yield EngineContext("e0", NAMES[0], config), devices
    for name in NAMES[:2]:
        kvcached.Device.unlink(config.namespace, name)


def test_a_neighbours_cache_makes_room(
    model: ModelSpec,
    pair: tuple[EngineContext, list[kvcached.Device]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("prism.engines.weights.links.ROOM_S", 60.0)
    context, devices = pair
    store = kvcached.WeightStore.open(context.config.engine.weight_store)
    layout = kvcached.Layout(1, 1, 64, dtype="float32")
    with (
        store.get_checkpoint(model.path) as stored,
        devices[0].client("e0") as client,
        devices[1].client("neighbour") as neighbour,
    ):
        kv = neighbour.alloc_kvcache(layout, 1 << 14, reserved_blocks=0)
        cached = kv.alloc_kv(kv.available_blocks())
        assert cached is not None
        assert devices[1].usage().free_bytes < LINK_BYTES
        neighbour.publish_evictable(kv.mapped_bytes())

        def evict(_size_bytes: int | None) -> kvcached.Shrunk:
            before_bytes = kv.mapped_bytes()
            kv.free_kv(cached)
            neighbour.publish_evictable(0)
            return kvcached.Shrunk(before_bytes - kv.mapped_bytes())

        def answer() -> None:
            select.select([neighbour], [], [], 60.0)
            neighbour.answer_requests(evict)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        links = LoadLinks(context, client)
        arena = client.alloc_weights(stored.layout(), "m")
        assert sorted(links.load(arena, stored, lambda: None)) == NAMES[:2]
        thread.join()
        arena.free()
        links.close()
        assert devices[1].usage().reserved_bytes == 0


def test_what_lies_idle_is_given_back(
    model: ModelSpec, pair: tuple[EngineContext, list[kvcached.Device]]
) -> None:
    context, opened = pair
    now_s = 0.0
    store = kvcached.WeightStore.open(context.config.engine.weight_store)
    with store.get_checkpoint(model.path) as stored, opened[0].client("e0") as client:
        links = LoadLinks(context, client, clock=lambda: now_s)
        arena = client.alloc_weights(stored.layout(), "m")
        carried = links.load(arena, stored, lambda: None)
        assert sorted(carried) == NAMES[:2]
        now_s = IDLE_S
        assert not links.answer_requests()
        assert opened[1].usage().reserved_bytes == LINK_BYTES
        now_s += 1
        assert links.answer_requests()
        assert opened[1].usage().clients == ()
        arena.free()
        links.close()


def test_a_ledger_that_goes_ends_no_engine(
    model: ModelSpec, pair: tuple[EngineContext, list[kvcached.Device]]
) -> None:
    context, devices = pair
    store = kvcached.WeightStore.open(context.config.engine.weight_store)
    now_s = 0.0
    with store.get_checkpoint(model.path) as stored, devices[0].client("e0") as client:
        links = LoadLinks(context, client, clock=lambda: now_s)

        def loaded() -> list[str]:
            with client.alloc_weights(stored.layout(), "m") as arena:
                return sorted(links.load(arena, stored, lambda: None))

        assert loaded() == NAMES[:2]
        kvcached.Device.unlink(context.config.namespace, NAMES[1], force=True)
        links.answer_requests()
        assert loaded() == NAMES[:2]
        now_s += IDLE_S + 1
        assert links.answer_requests()
        assert loaded() == NAMES[:1]
        links.close()
