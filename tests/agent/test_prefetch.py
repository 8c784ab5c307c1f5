"""Prefetch hints of the cluster scheduler are read once, in order, and all answered."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvcached import Checkpoint, WeightKey, WeightStore
from prism.agent.network import prefetch
from prism.agent.network.prefetch import Prefetcher
from prism.config.resolved import write_resolved
from prism.engines.fake import weight_key
from prism.messages.agent import ActionResult, PrefetchModel
from prism.messages.model_spec import ModelSpec
from prism.queueing import BundledRedis
from tests.agent.conftest import FAST
from tests.agent.harness import make_config, model_spec, world


def saved_model(directory: Path, name: str, elements: int = 1 << 16) -> ModelSpec:
    folder = directory / name
    folder.mkdir()
    values = np.random.default_rng(len(name)).normal(size=elements).astype(np.float32)
    save_file({"w": values}, folder / "model.safetensors")
    return msgspec.structs.replace(model_spec(name), path=str(folder))


class Line:
    """Prefetcher with a separate store, and its answers."""

    def __init__(self, directory: Path, with_store: bool = True) -> None:
        self.store = WeightStore.open(directory / "store") if with_store else None
        self.answers: list[ActionResult] = []
        self.prefetcher = Prefetcher(self.store, weight_key, self.answers.append)

    def run(self, answers: int) -> list[ActionResult]:
        until_s = time.monotonic() + 60
        while len(self.answers) < answers:
            assert time.monotonic() < until_s, self.answers
            self.prefetcher.tick()
            time.sleep(0.001)
        return self.answers

    def has(self, spec: ModelSpec) -> bool:
        assert self.store is not None
        found = self.store.find_checkpoint(self.store.content_of(Checkpoint.open(spec.path)))
        if found is not None:
            found.close()
        return found is not None


def test_hints_are_served_in_line_and_read_once(tmp_path: Path) -> None:
    line = Line(tmp_path)
    a, b = saved_model(tmp_path, "a"), saved_model(tmp_path, "bb")
    for action_id, spec in enumerate((a, b, b, a)):
        line.prefetcher.hint(PrefetchModel(action_id, spec))
    answers = line.run(4)
    assert all(answer.ok for answer in answers)
    assert {answer.action_id for answer in answers[:2]} == {0, 3}
    assert line.has(a)
    assert line.has(b)
    assert line.store is not None
    assert line.store.counters().made_entries == 2


def test_what_the_engines_keep_is_not_read_again(tmp_path: Path) -> None:
    line, spec = Line(tmp_path), saved_model(tmp_path, "a")
    assert line.store is not None
    key: WeightKey = weight_key(line.store.content_of(Checkpoint.open(spec.path)), spec)
    line.store.get(key, lambda builder: builder.put("x", np.zeros(3))).close()
    line.prefetcher.hint(PrefetchModel(1, spec))
    assert line.run(1)[0].ok
    assert not line.has(spec)


def test_files_that_cannot_be_read_are_named_and_the_next_is_served(tmp_path: Path) -> None:
    line = Line(tmp_path)
    good, cut = saved_model(tmp_path, "good"), saved_model(tmp_path, "cut")
    file = Path(cut.path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    line.prefetcher.hint(PrefetchModel(1, cut))
    line.prefetcher.hint(PrefetchModel(2, good))
    first, second = line.run(2)
    assert (first.action_id, first.ok, second.ok) == (1, False, True)
    assert str(file) in first.message


def test_without_a_store_a_hint_is_refused(tmp_path: Path) -> None:
    line = Line(tmp_path, with_store=False)
    line.prefetcher.hint(PrefetchModel(1, saved_model(tmp_path, "a")))
    [answer] = line.answers
    assert not answer.ok
    assert "engine.weight_store" in answer.message


def test_the_line_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "WAITING_MAX", 2)
    line = Line(tmp_path)
    for action_id, name in enumerate(("a", "bb", "ccc")):
        line.prefetcher.hint(PrefetchModel(action_id, saved_model(tmp_path, name)))
    assert [(a.action_id, a.ok) for a in line.answers] == [(2, False)]
    assert sum(a.ok for a in line.run(3)) == 2


def test_stopping_leaves_nothing_half_read(tmp_path: Path) -> None:
    line = Line(tmp_path)
    line.prefetcher.hint(PrefetchModel(1, saved_model(tmp_path, "a", 16 << 20)))
    line.prefetcher.stop()
    line.prefetcher.tick()
    assert not line.answers
    assert line.store is not None
    assert not list((line.store.directory / "partial").iterdir())


async def test_an_agent_obeys_a_hint(
    redis_server: BundledRedis, short_dir: Path, namespace: str, tmp_path: Path
) -> None:
    """Prefetches while its models serve, into the store that its engines share."""
    config = make_config(short_dir, namespace, redis_server.url)
    engine = msgspec.structs.replace(config.engine, weight_store=str(tmp_path / "store"))
    config = msgspec.structs.replace(config, engine=engine)
    write_resolved(config, short_dir / "cluster.json")
    spec = saved_model(tmp_path, "a")
    async with world(config, FAST) as this:
        await this.serve("a")
        asked = await this.frontend.send(3, "a", max_tokens=50)
        result = await this.scheduler.ask(PrefetchModel(0, spec))
        assert (result.ok, result.message) == (True, "a is in the weight store")
        await this.frontend.finish(asked)
    assert Line(tmp_path).has(spec)
