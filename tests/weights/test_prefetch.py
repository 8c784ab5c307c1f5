"""Reading ahead: in the background, once, and nothing half read."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from kvcached import Checkpoint, StoredWeights, WeightBuilder, WeightKey, WeightStore, errors

from .models import assert_same, files_below, stored_arrays, tensors


def key(content: str) -> WeightKey:
    return WeightKey(content, "engine-1", "float32")


def put(builder: WeightBuilder) -> None:
    builder.put("x", np.zeros(3))


def test_prefetch_reads_in_the_background(store: WeightStore, model: Path) -> None:
    assert store.prefetch(model).wait(60)
    before = store.counters()
    assert before.disk_bytes > 0
    store.get_checkpoint(model).close()
    assert store.counters().disk_bytes == before.disk_bytes
    missing = store.prefetch(model / "nowhere")
    with pytest.raises(errors.InvalidArgumentError, match="neither a file"):
        missing.wait(60)
    assert missing.done


def test_prefetch_has_nothing_to_do_for_a_model_in_the_engines_form(
    store: WeightStore, model: Path
) -> None:
    content = store.content_of(Checkpoint.open(model))
    store.get(key(content), put).close()
    before = store.counters()
    assert store.prefetch(model, unless=key).wait(60)
    assert store.counters().disk_bytes == before.disk_bytes
    assert store.counters().found_entries == before.found_entries + 1
    assert store.prefetch(model, unless=lambda _: key("another")).wait(60)
    assert store.counters().disk_bytes > before.disk_bytes


def test_wait_raises_whatever_ended_it(store: WeightStore, model: Path) -> None:
    failing = store.prefetch(model, unless=lambda _: 1 / 0)  # type: ignore[arg-type,return-value]
    with pytest.raises(ZeroDivisionError):
        failing.wait(60)
    wrong = store.prefetch(model, unless=lambda _: "no key")  # type: ignore[arg-type,return-value]
    with pytest.raises(errors.InvalidArgumentError, match="key must be a WeightKey, not str"):
        wrong.wait(60)
    with pytest.raises(errors.InvalidArgumentError, match="model must be a str or Path"):
        store.prefetch(123)  # type: ignore[arg-type]


def test_a_checkpoint_is_found_once_it_is_whole(
    store: WeightStore, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits for the running reader instead of reading the disk a second time."""
    content = store.content_of(Checkpoint.open(model))
    assert store.find_checkpoint(content) is None
    reading, go_on = threading.Event(), threading.Event()
    preadv = os.preadv

    def slow(*arguments: object) -> int:
        reading.set()
        go_on.wait(60)
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", slow)
    prefetch = store.prefetch(model)
    assert reading.wait(60)
    other, found = WeightStore.open(store.directory), list[StoredWeights | None]()
    asker = threading.Thread(target=lambda: found.append(other.find_checkpoint(content)))
    asker.start()
    asker.join(0.05)
    assert not found
    go_on.set()
    asker.join(60)
    assert prefetch.wait(60)
    assert found[0] is not None
    with found[0] as weights:
        assert_same(stored_arrays(weights), tensors())
    assert other.counters().disk_bytes == 0


def test_a_cancelled_prefetch_leaves_nothing(
    store: WeightStore, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()
    preadv = os.preadv

    def slow(*arguments: object) -> int:
        reading.set()
        go_on.wait(60)
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", slow)
    prefetch = store.prefetch(model)
    assert reading.wait(60)
    prefetch.cancel()
    go_on.set()
    with pytest.raises(errors.LoadCancelledError, match="cancelled"):
        prefetch.wait(60)
    assert store.used_bytes() == 0
    assert not files_below(store.directory / "partial")
