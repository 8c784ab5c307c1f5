"""Engine processes that load weights over the links of all GPUs of their node, on four GPUs of the
test libcuda. The fake engine compares every byte of its weights before it says that it serves."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from uuid import uuid4

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

import kvcached
from prism.config import ClusterConfig, DeviceConfig, EngineConfig
from prism.engines.core import EngineContext
from prism.engines.fake import expected_tokens
from prism.engines.links import IDLE_S, LoadLinks
from prism.messages import Activate, ActivationFailed, Deactivate, Deactivated, ModelSpec, Submit
from tests.engines.harness import DeviceUnderTest, request
from tests.engines.subjects import Shape, model_spec
from tests.kvcached.compiling import build_libcuda
from tests.kvcached.conftest import libcuda  # noqa: F401 (a fixture: ledgers are opened here too)

pytestmark = pytest.mark.usefixtures("libcuda")

NAMES = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
PAGE = 64 << 10
LINK_BYTES = 1 << 20
TENSORS, TENSOR_BYTES = 6, 1 << 20
OPTIONS = {"load_weights": True, "cpu_reads_gpu": True}


class Node:
    """Four GPUs, an engine's nursery on the first."""

    def __init__(self, config: ClusterConfig, environment: dict[str, str]) -> None:
        self.engine = DeviceUnderTest("fake", config, environment, NAMES[0])
        self.ledgers = [self._ledger(config, place) for place in config.devices]

    @staticmethod
    def _ledger(config: ClusterConfig, place: DeviceConfig) -> kvcached.Device:
        return kvcached.Device.open(
            place.name,
            capacity_bytes=place.capacity_bytes,
            page_bytes=place.page_bytes,
            namespace=config.namespace,
        )

    def charged(self) -> list[int]:
        return [ledger.usage().reserved_bytes for ledger in self.ledgers]

    def lent(self) -> list[int]:
        """What engines hold for loads on each GPU."""
        return [
            sum(c.committed_bytes for c in ledger.usage().clients if c.name.endswith(".links"))
            for ledger in self.ledgers
        ]

    def until(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, (self.charged(), self.engine._logs())
            time.sleep(0.005)

    def deactivate(self) -> None:
        self.engine.send(Deactivate())
        self.engine.wait_for(Deactivated)

    def close(self) -> None:
        for ledger in self.ledgers[1:]:
            ledger.destroy(force=True)
        self.engine.close()


MakeNode = Callable[..., AbstractContextManager[Node]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = tmp_path_factory.mktemp("model")
    rng = np.random.default_rng(0)
    tensors = {f"t{n}": rng.integers(0, 256, TENSOR_BYTES, np.uint8) for n in range(TENSORS)}
    save_file(tensors, folder / "model.safetensors")
    shape = Shape("Plain", 2, 2, 32, TENSORS * TENSOR_BYTES, str(folder))
    return model_spec("m", shape, context_length=128)


def config_of(
    model: ModelSpec, folder: Path, capacities: tuple[int, ...], **engine: object
) -> ClusterConfig:
    settings = EngineConfig(
        adapter="fake",
        static_bytes=PAGE,
        weight_store=str(folder / "store"),
        weight_store_bytes=32 << 20,
        link_bytes=LINK_BYTES,
        links_from_bytes=TENSORS * TENSOR_BYTES,
    )
    return ClusterConfig(
        namespace=f"t{uuid4().hex[:10]}",
        run_dir=str(folder),
        redis_url="",
        policy="prism",
        devices=[DeviceConfig(n, c, PAGE, 2) for n, c in zip(NAMES, capacities, strict=False)],
        models=[model],
        engine=msgspec.structs.replace(settings, **engine),
    )


@contextmanager
def opened(
    model: ModelSpec,
    folder: Path,
    capacities: tuple[int, ...] = (32 << 20,) * 4,
    environment: dict[str, str] | None = None,
    **engine: object,
) -> Iterator[Node]:
    node = Node(
        config_of(model, folder, capacities, **engine),
        {
            "PRISM_FAKE": msgspec.json.encode(OPTIONS).decode(),
            "KVCACHED_LIBCUDA": str(build_libcuda()),
            "KVCACHED_TEST_CUDA_DEVICES": "4",
            **(environment or {}),
        },
    )
    try:
        yield node
    finally:
        node.close()


@pytest.fixture(scope="module")
def node(model: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with opened(model, tmp_path_factory.mktemp("node")) as made:
        yield made


@pytest.fixture(scope="module")
def slow_node(model: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A load takes six seconds."""
    folder = tmp_path_factory.mktemp("slow")
    with opened(model, folder, load_bytes_per_s=1 << 20) as made:
        yield made


@pytest.fixture
def make_node(model: ModelSpec, tmp_path: Path) -> MakeNode:
    return partial(opened, model, tmp_path)


def test_an_activation_over_four_links(node: Node, model: ModelSpec) -> None:
    node.engine.fork()
    assert node.lent() == [0, 0, 0, 0]
    for _ in range(2):
        activated = node.engine.activate(model)
        assert sorted(activated.link_bytes) == NAMES
        assert all(size > 0 for size in activated.link_bytes.values())
        assert sum(activated.link_bytes.values()) == TENSORS * TENSOR_BYTES
        assert node.lent() == [0, LINK_BYTES, LINK_BYTES, LINK_BYTES]
        node.engine.streams.clear()
        node.engine.send(Submit([request("r", "m", [1, 2, 3], 8)]))
        assert node.engine.finish("r")[0].token_ids == expected_tokens([1, 2, 3], 8)
        node.deactivate()
        assert node.charged()[0] == 0  # weights, KV and share; what was lent stays a while
    node.engine.end()
    assert node.charged() == [0, 0, 0, 0]


def test_what_is_lent_goes_when_it_is_asked_for(node: Node, model: ModelSpec) -> None:
    node.engine.fork()
    node.engine.activate(model)
    node.ledgers[2].request_room(PAGE, within_s=60.0)
    node.until(lambda: node.lent() == [0, LINK_BYTES, 0, LINK_BYTES])
    [answer] = node.ledgers[3].shrink("e0.links", wait_s=60.0)
    assert answer.outcome in ("answered", "gone")
    node.until(lambda: node.lent() == [0, LINK_BYTES, 0, 0])
    node.deactivate()
    assert sorted(node.engine.activate(model).link_bytes) == NAMES
    node.engine.end()
    assert node.charged() == [0, 0, 0, 0]


def test_killed_in_mid_load_leaves_nothing_on_any_gpu(slow_node: Node, model: ModelSpec) -> None:
    slow_node.engine.fork()
    slow_node.engine.send(Activate(model))
    slow_node.until(
        lambda: all(slow_node.lent()[1:]) and slow_node.charged()[0] > TENSORS * TENSOR_BYTES
    )
    os.kill(slow_node.engine.pids["e0"], signal.SIGKILL)
    assert slow_node.engine.exited().status == -signal.SIGKILL
    slow_node.until(lambda: slow_node.charged() == [0, 0, 0, 0])
    assert [ledger.usage().clients for ledger in slow_node.ledgers] == [()] * 4


def test_killed_after_the_load_leaves_nothing_on_any_gpu(
    make_node: MakeNode, model: ModelSpec
) -> None:
    with make_node(environment={"PRISM_FAULT_STAGE": "build"}) as node:
        node.engine.fork()
        node.engine.send(Activate(model))
        assert node.engine.exited().status == -signal.SIGKILL
        node.until(lambda: node.charged() == [0, 0, 0, 0])
        assert [ledger.usage().clients for ledger in node.ledgers] == [()] * 4


def test_store_files_that_are_cut_in_mid_load(slow_node: Node, model: ModelSpec) -> None:
    """The activation fails by a file's name and gives everything back; the engine lives."""
    store = kvcached.WeightStore.open(slow_node.engine.config.engine.weight_store)
    with store.get_checkpoint(model.path) as stored:
        paths = [Path(stored.path(name)) for name in stored.specs]
    slow_node.engine.fork()
    slow_node.engine.send(Activate(model))
    slow_node.until(
        lambda: all(slow_node.lent()[1:]) and slow_node.charged()[0] > TENSORS * TENSOR_BYTES
    )
    for path in paths:
        os.truncate(path, 1000)
    failed = slow_node.engine.wait_for(ActivationFailed)
    assert any(f"{path} ends at byte 1000" in failed.message for path in paths)
    assert slow_node.charged()[0] == 0
    slow_node.engine.end()
    assert slow_node.charged() == [0, 0, 0, 0]


def test_gpus_that_cannot_help_are_left_out(make_node: MakeNode, model: ModelSpec) -> None:
    """One is too small for the staging, one has no ledger: nobody serves there."""
    with make_node((32 << 20, LINK_BYTES // 2, 32 << 20, 32 << 20)) as node:
        node.ledgers.pop().destroy()
        node.engine.fork()
        assert sorted(node.engine.activate(model).link_bytes) == ["cuda:0", "cuda:2"]
        log = node.engine.engine_log()
        assert "cuda:1 does not help to load weights: 524288 bytes are free there" in log
        assert "cuda:3 does not help to load weights" in log
        node.engine.end()
        assert node.charged() == [0, 0, 0]


@pytest.mark.parametrize("case", ["no peers", "own", "small"])
def test_the_own_link_is_enough(make_node: MakeNode, model: ModelSpec, case: str) -> None:
    environment = {"KVCACHED_TEST_CUDA_PEERS": "0"} if case == "no peers" else {}
    settings = {"own": {"weight_links": "own"}, "small": {"links_from_bytes": 1 << 30}}
    with make_node(environment=environment, **settings.get(case, {})) as node:
        node.engine.fork()
        activated = node.engine.activate(model)
        assert activated.link_bytes == {"cuda:0": TENSORS * TENSOR_BYTES}
        log = node.engine.engine_log()
        assert log.count("cannot read the memory of") == (3 if case == "no peers" else 0)
        assert node.charged()[1:] == [0, 0, 0]
        node.engine.end()


def test_a_gpu_that_fails_in_mid_load(make_node: MakeNode, model: ModelSpec) -> None:
    """Its lanes are made with 24 calls; it is lost in the first chunks of its four lanes."""
    with make_node(environment={"KVCACHED_TEST_CUDA_LOSE": "1:30"}) as node:
        node.engine.fork()
        activated = node.engine.activate(model)
        assert sum(activated.link_bytes.values()) == TENSORS * TENSOR_BYTES
        assert {"cuda:0", "cuda:2", "cuda:3"} <= activated.link_bytes.keys()
        assert "cuda:1 failed in the middle of a load" in node.engine.engine_log()
        assert node.lent() == [0, 0, LINK_BYTES, LINK_BYTES]
        node.engine.end()
        assert node.charged() == [0, 0, 0, 0]


def test_ranks_load_at_once_and_share_what_no_rank_has(node: Node, model: ModelSpec) -> None:
    """Two ranks on cuda:0 and cuda:1: each has one of the two other GPUs beside its own link."""
    node.engine.fork(peers=("cuda:1",))
    activated = node.engine.activate(model)
    assert sorted(activated.link_bytes) == NAMES
    both = 2 * TENSORS * TENSOR_BYTES  # the fake's ranks load all tensors
    assert sum(activated.link_bytes.values()) == both
    assert activated.link_bytes["cuda:0"] + activated.link_bytes["cuda:2"] == both // 2
    assert node.lent() == [0, 0, LINK_BYTES, LINK_BYTES]
    node.engine.end()
    assert node.charged() == [0, 0, 0, 0]


def test_no_room_for_the_weights_gives_everything_back(
    make_node: MakeNode, model: ModelSpec
) -> None:
    with make_node((4 << 20, 32 << 20, 32 << 20, 32 << 20)) as node:
        node.engine.fork()
        node.engine.send(Activate(model))
        failed = node.engine.wait_for(ActivationFailed)
        assert failed.missing_bytes > 0
        assert node.charged()[0] == 0
        node.engine.end()
        assert node.charged() == [0, 0, 0, 0]


@pytest.fixture
def pair(model: ModelSpec, tmp_path: Path) -> Iterator[tuple[EngineContext, list[kvcached.Device]]]:
    """Two GPUs of this process, the second one with room for 24 pages."""
    config = config_of(model, tmp_path, (32 << 20, 24 * PAGE))
    devices = [Node._ledger(config, place) for place in config.devices]
    yield EngineContext("e0", NAMES[0], config), devices
    for name in NAMES[:2]:
        kvcached.Device.unlink(config.namespace, name)


def test_a_neighbours_cache_makes_room(
    model: ModelSpec, pair: tuple[EngineContext, list[kvcached.Device]]
) -> None:
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
