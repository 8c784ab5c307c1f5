"""Weights are copied from another machine's store over real sockets, or else read from disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvcached import Checkpoint, WeightBuilder, WeightKey, WeightStore
from kvcached.errors import LoadCancelledError, WeightFileError
from kvcached.weights.entry import checkpoint_key
from kvcached.weights.exchange import Exchange
from prism.agent.network.prefetch import Prefetcher
from prism.agent.network.weight_server import WeightServer
from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.endpoints import NodeConfig
from prism.curve import new_secret
from prism.engines.weights import peer_weights
from prism.engines.weights.peer_weights import PeerWeights
from prism.messages.agent import ActionResult, PrefetchModel
from prism.messages.model_spec import ModelSpec
from prism.messages.weight_exchange import AskPart, Part
from tests.agent.harness import make_config, model_spec
from tests.ports import free_port

ELEMENTS = 3 << 18  # 3 MiB: not a whole number of parts with the header's neighbours


def save(folder: Path, seed: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors = {n: rng.normal(size=ELEMENTS + 7).astype(np.float32) for n in ("w", "v")}
    save_file({**tensors, "empty": np.zeros((0, 3), np.float32)}, folder / "model.safetensors")


@dataclass
class Machine:
    """Machine with its own files and store."""

    config: ClusterConfig
    spec: ModelSpec
    store: WeightStore
    peers: PeerWeights

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint.open(self.spec.path)

    @property
    def disk_bytes(self) -> int:
        return self.store.counters().disk_bytes

    def fetch(self, *forms: str) -> str:
        return self.peers.fetch(self.spec, lambda c: [WeightKey(c, f, "f32") for f in forms])

    def check_right(self) -> None:
        """Asserts that the store has the tensors of this machine's files."""
        wanted = self.checkpoint.tensors
        with self.store.get_checkpoint(self.spec.path) as stored:
            assert set(stored.specs) == set(wanted)
            for name, tensor in wanted.items():
                with tensor.path.open("rb") as file:
                    file.seek(tensor.offset_bytes)
                    assert file.read(tensor.spec.size_bytes) == stored.path(name).read_bytes()


class Pair:
    """Machine `a`, whose store is served, and `b`."""

    def __init__(self, folder: Path, short_dir: Path, namespace: str) -> None:
        self._folder = folder
        config = make_config(short_dir, namespace, "redis://nowhere")
        self._nodes = [
            NodeConfig(name, "127.0.0.1", free_port(), 1, 1, disk_bytes_s=1e9) for name in "ab"
        ]
        self._config = msgspec.structs.replace(config, cluster_key=new_secret())
        for name in "ab":
            save(folder / name / "m")
        self.a, self.b = self.machine("a"), self.machine("b")
        self.server = WeightServer(self.a.config, Exchange(self.a.store))

    def machine(self, name: str, **changes: float) -> Machine:
        nodes = [msgspec.structs.replace(node, **changes) for node in self._nodes]
        spec = msgspec.structs.replace(model_spec("m"), path=str(self._folder / name / "m"))
        config = msgspec.structs.replace(self._config, node=name, nodes=nodes, models=[spec])
        store = WeightStore.open(self._folder / name / "store", max_bytes=256 << 20)
        return Machine(config, spec, store, PeerWeights(store, config))


@pytest.fixture
def pair(tmp_path: Path, short_dir: Path, namespace: str) -> Iterator[Pair]:
    made = Pair(tmp_path, short_dir, namespace)
    made.server.start()
    yield made
    made.server.stop()


def await_disk(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asserts that the machine gets nothing from a peer, in bounded time, and reads its disk."""
    monkeypatch.setattr(peer_weights, "STALL_S", 1.0)
    assert machine.fetch() == ""
    assert machine.disk_bytes == 0
    assert not list((machine.store.directory / "partial").iterdir())
    machine.check_right()
    assert machine.disk_bytes > 0


def test_what_the_peer_has_is_not_read_from_disk(pair: Pair) -> None:
    pair.a.store.get_checkpoint(pair.a.spec.path).close()
    assert pair.b.fetch() == "a"
    pair.b.check_right()
    assert pair.b.disk_bytes == 0  # not even to hash the files
    assert pair.b.store.content_of(pair.b.checkpoint) == pair.a.store.content_of(pair.a.checkpoint)
    assert pair.b.fetch() == ""


def test_an_engines_own_form_comes_rather_than_the_files(pair: Pair) -> None:
    content = pair.a.store.content_of(pair.a.checkpoint)

    def put(builder: WeightBuilder) -> None:
        builder.put("fused", np.arange(5, dtype=np.float32))

    pair.a.store.get_checkpoint(pair.a.spec.path).close()
    for form in ("e0", "e1"):
        pair.a.store.get(WeightKey(content, form, "f32"), put).close()
    assert pair.b.fetch("e0", "e1") == "a"
    found = pair.b.store.find(WeightKey(content, "e1", "f32"))
    assert found is not None
    with found:
        assert found.path("fused").read_bytes() == np.arange(5, dtype=np.float32).tobytes()
    assert pair.b.store.find_checkpoint(content) is None
    assert pair.b.fetch("e0", "e2") == "a"  # not all of them: the files' own tensors
    pair.b.check_right()
    assert pair.b.disk_bytes == 0


def test_a_peer_that_has_nothing_leaves_the_disk(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await_disk(pair.b, monkeypatch)
    pair.a.store.content_of(pair.a.checkpoint)  # known, and still not there
    assert pair.machine("b").fetch() == ""


def test_other_files_at_the_same_path_are_not_mixed_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.a.store.get_checkpoint(pair.a.spec.path).close()
    save(Path(pair.b.spec.path), seed=1)  # names, sizes and headers are alike
    await_disk(pair.b, monkeypatch)


def test_damaged_bytes_are_not_kept(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with pair.a.store.get_checkpoint(pair.a.spec.path) as stored:
        path = stored.path("v")
    content = path.read_bytes()
    path.write_bytes(content[:2_000_000] + b"damage" + content[2_000_006:])
    await_disk(pair.b, monkeypatch)


@pytest.mark.parametrize("size", ["cut", "gone"])
def test_what_goes_on_the_way_leaves_the_disk(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    """Covers a peer whose store lost the weights after it had offered them."""
    pair.a.store.get_checkpoint(pair.a.spec.path).close()
    answer, asked = pair.server._answer, list[AskPart]()

    def less(message: AskPart) -> object:
        part = answer(message)
        if isinstance(part, Part):
            asked.append(message)
            if len(asked) > 3:
                return Part(part.data[:-1] if size == "cut" else b"")
        return part

    monkeypatch.setattr(pair.server, "_answer", less)
    await_disk(pair.b, monkeypatch)
    assert len(asked) > 3


def test_a_peer_that_dies_leaves_the_disk(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers a death midway; the peer is not asked again soon."""
    pair.a.store.get_checkpoint(pair.a.spec.path).close()
    answer, parts = pair.server._answer, list[AskPart]()

    def last(message: AskPart) -> object:
        if isinstance(message, AskPart):
            parts.append(message)
            if len(parts) == 3:
                pair.server._cancel()
        return answer(message)

    monkeypatch.setattr(pair.server, "_answer", last)
    await_disk(pair.b, monkeypatch)
    assert len(parts) == 3
    monkeypatch.setattr(peer_weights, "Sketch", None)  # what a second try begins with
    assert pair.b.fetch("e") == ""


def test_a_peer_slower_than_the_disk_is_left(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.a.store.get_checkpoint(pair.a.spec.path).close()
    monkeypatch.setattr(peer_weights, "STALL_S", 0.5)
    slow = pair.machine("b", network_bytes_s=1e15, disk_bytes_s=1e14)
    pair.server._bytes_s = 2e6
    began_s = monotonic()
    assert slow.fetch() == ""
    assert monotonic() - began_s < 3.0  # the whole would take longer
    slow.check_right()


def test_nobody_is_asked_where_the_disk_is_faster(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.a.store.get_checkpoint(pair.a.spec.path).close()
    fast = pair.machine("b", disk_bytes_s=2e9)
    monkeypatch.setattr(peer_weights, "_Link", None)
    assert fast.fetch() == ""


def test_who_has_not_the_key_gets_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.a.store.get_checkpoint(pair.a.spec.path).close()
    monkeypatch.setattr(peer_weights, "QUERY_S", 0.5)
    config = msgspec.structs.replace(pair.b.config, cluster_key=new_secret())
    pair.b.peers = PeerWeights(pair.b.store, config)
    await_disk(pair.b, monkeypatch)


@pytest.mark.parametrize("blob", ["../version", "../../x", "0" * 64, "/etc/passwd", ""])
def test_nothing_but_tensors_is_read(pair: Pair, blob: str) -> None:
    assert Exchange(pair.a.store).read(blob, 0, 100) == b""


def test_files_that_are_not_there_are_refused_as_ever(pair: Pair) -> None:
    pair.a.store.get_checkpoint(pair.a.spec.path).close()
    (Path(pair.b.spec.path) / "model.safetensors").unlink()
    with pytest.raises(WeightFileError, match=r"does not have \*\.safetensors"):
        pair.b.fetch()


def test_a_fetch_that_is_given_up_leaves_nothing(pair: Pair) -> None:
    pair.a.store.get_checkpoint(pair.a.spec.path).close()
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(LoadCancelledError):
        pair.b.peers.fetch(pair.b.spec, lambda _: [], cancel)
    assert not list((pair.b.store.directory / "partial").iterdir())


def test_a_hint_brings_every_ranks_weights(pair: Pair) -> None:
    def weight_key(content: str, _: ModelSpec, rank: int, ranks: int) -> WeightKey:
        return WeightKey(content, "e", "f32", rank, ranks)

    spec = msgspec.structs.replace(pair.b.spec, tp=2)
    content = pair.a.store.content_of(pair.a.checkpoint)
    keys = [weight_key(content, spec, rank, 2) for rank in range(2)]
    for key in keys:
        pair.a.store.get(key, lambda builder: builder.put("x", np.zeros(3))).close()
    answers: list[ActionResult] = []
    line = Prefetcher(pair.b.store, weight_key, answers.append, pair.b.peers)
    line.hint(PrefetchModel(7, spec))
    await_(lambda: line.tick() or answers)
    assert answers == [ActionResult(7, True, "m is in the weight store")]
    assert all(map(Exchange(pair.b.store).has, keys))
    assert not Exchange(pair.b.store).has(checkpoint_key(content))
    assert pair.b.disk_bytes == 0


def await_(true: Callable[[], object]) -> None:
    until_s = monotonic() + 60
    while not true():
        assert monotonic() < until_s
        sleep(0.002)
