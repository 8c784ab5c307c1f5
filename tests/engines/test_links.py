"""Engine processes that load weights over the links of all GPUs of their node, on four GPUs of the
test libcuda. The fake engine compares every byte of its weights before it reports that it
serves."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

import kvcached
from prism.engines.fake import expected_tokens
from prism.messages.engine import Activated, ActivateEngine, ActivationFailed, Submit
from prism.messages.model_spec import ModelSpec
from tests.engines.gpus import (
    LINK_BYTES,
    NAMES,
    PAGE,
    TENSOR_BYTES,
    TENSORS,
    Node,
    make_model,
    opened,
)
from tests.engines.harness import request
from tests.kvcached.conftest import libcuda  # noqa: F401 (a fixture: ledgers are opened here too)

pytestmark = pytest.mark.usefixtures("libcuda")

MakeNode = Callable[..., AbstractContextManager[Node]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def node(model: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with opened(model, tmp_path_factory.mktemp("node")) as made:
        yield made


@pytest.fixture(scope="module")
def slow_node(model: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Yields a node on which a load takes six seconds."""
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
        assert node.charged()[0] == 0  # weights, KV and share; lent memory stays a while
    node.engine.end()
    assert node.charged() == [0, 0, 0, 0]


def test_two_engines_load_at_once_over_the_same_links(node: Node, model: ModelSpec) -> None:
    engines = ("e0", "e1")
    for engine in engines:
        node.engine.fork(engine)
    for engine in engines:
        node.engine.send(ActivateEngine(model), engine)
    for engine in engines:
        activated = node.engine.wait_for(Activated, engine)
        assert sorted(activated.link_bytes) == NAMES
        assert sum(activated.link_bytes.values()) == TENSORS * TENSOR_BYTES
    assert node.lent() == [0, *[2 * LINK_BYTES] * 3]
    for engine in engines:
        node.engine.end(engine)
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
    slow_node.engine.send(ActivateEngine(model))
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
        node.engine.send(ActivateEngine(model))
        assert node.engine.exited().status == -signal.SIGKILL
        node.until(lambda: node.charged() == [0, 0, 0, 0])
        assert [ledger.usage().clients for ledger in node.ledgers] == [()] * 4


def test_store_files_that_are_cut_in_mid_load(slow_node: Node, model: ModelSpec) -> None:
    """Fails the activation with the name of a file and gives all memory back; the engine lives."""
    store = kvcached.WeightStore.open(slow_node.engine.config.engine.weight_store)
    with store.get_checkpoint(model.path) as stored:
        paths = [Path(stored.path(name)) for name in stored.specs]
    slow_node.engine.fork()
    slow_node.engine.send(ActivateEngine(model))
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
    """Leaves out a GPU that is too small for the staging, and one without a ledger (no agent)."""
    with make_node((32 << 20, LINK_BYTES // 2, 32 << 20, 32 << 20)) as node:
        node.ledgers.pop().destroy()
        node.engine.fork()
        assert sorted(node.engine.activate(model).link_bytes) == ["cuda:0", "cuda:2"]
        log = node.engine.engine_log()
        assert "the link of cuda:1 is not used to load weights: 512KiB are free, " in log
        assert "the link of cuda:3 is not used to load weights" in log
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
    """Loses a GPU in the first chunks of its four lanes, which take 24 calls to make."""
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
    """Loads two ranks on cuda:0 and cuda:1: each has its own link and one of the two other GPUs."""
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
        node.engine.send(ActivateEngine(model))
        failed = node.engine.wait_for(ActivationFailed)
        assert failed.missing_bytes > 0
        assert node.charged()[0] == 0
        node.engine.end()
        assert node.charged() == [0, 0, 0, 0]
