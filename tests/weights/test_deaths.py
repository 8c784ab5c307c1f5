"""Processes killed with SIGKILL at every stage; the store and the device are whole afterwards."""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from kvcached import Checkpoint, Device, WeightBuilder, WeightKey, WeightStore

from .conftest import Spawn
from .models import assert_same, files_below, stored_arrays, tensors

pytestmark = [pytest.mark.slow, pytest.mark.first]


def said(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def key(name: str) -> WeightKey:
    return WeightKey(name, "engine-1", "any")


def check_whole(store: WeightStore, model: Path) -> None:
    """Checks that the store opens, returns correct weights and leaks nothing after a death."""
    fresh = WeightStore.open(store.directory, max_bytes=64 << 20)
    assert not files_below(store.directory / "partial")
    with fresh.get_checkpoint(model) as weights:
        assert_same(stored_arrays(weights), tensors())
        blobs = {blob.stat().st_ino for blob in (store.directory / "blobs").iterdir()}
        linked = {weights.path(name).stat().st_ino for name in weights.specs}
        assert blobs == linked


@pytest.mark.parametrize("seed", range(3))
def test_a_maker_killed_at_any_moment_leaves_nothing_that_is_taken_for_whole(
    store: WeightStore, model: Path, spawn: Spawn, seed: int
) -> None:
    rng = random.Random(seed)
    for _ in range(4):
        maker = spawn("make_again")
        assert said(maker) == ["ready"]
        time.sleep(rng.random() * 0.1)
        end(maker)
        check_whole(store, model)


def test_weights_of_a_killed_process_may_go(store: WeightStore, spawn: Spawn) -> None:
    user = spawn("use", "mine")
    assert said(user) == ["ready", str(1 << 20)]
    assert not store.discard(key("mine"))
    end(user)
    assert store.discard(key("mine"))
    assert store.used_bytes() == 0


def test_another_process_makes_what_a_killed_one_began(store: WeightStore, spawn: Spawn) -> None:
    maker = spawn("make_slowly")
    assert said(maker) == ["half"]
    assert store.used_bytes() > 1 << 20
    waiting = spawn("make_slowly")
    assert store.find(key("slow")) is None
    end(maker)
    assert said(waiting) == ["half"]  # it had waited for the first one
    end(waiting)

    def produce(builder: WeightBuilder) -> None:
        builder.put("y", np.ones(3))

    with store.get(key("slow"), produce) as weights:
        assert set(weights.specs) == {"y"}
    assert not files_below(store.directory / "partial")


@pytest.mark.parametrize("bytes_per_s", [4 << 20, 1 << 30])
def test_a_load_killed_at_any_moment_returns_every_page(
    store: WeightStore, model: Path, device: Device, spawn: Spawn, bytes_per_s: int
) -> None:
    rng = random.Random(bytes_per_s)
    for _ in range(4):
        loader = spawn("load_slowly", bytes_per_s)
        assert said(loader) == ["ready"]
        time.sleep(rng.random() * 0.1)
        end(loader)
        usage = device.usage()
        assert (usage.clients, usage.static_bytes, usage.free_bytes) == (
            (),
            0,
            usage.capacity_bytes,
        )
        assert device.resident_bytes() == 0
    check_whole(store, model)


def test_the_second_activation_reads_nothing_from_disk(
    store: WeightStore, model: Path, spawn: Spawn
) -> None:
    """Compares counters of the store and the kernel, without the checkpoint in the page cache."""
    first = spawn("read_io")
    store_bytes, _, total_bytes = map(int, said(first))
    assert store_bytes > total_bytes > 0
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    Checkpoint.open(model)  # the headers alone are in the cache again
    second = spawn("read_io")
    assert said(second)[:2] == ["0", "0"]


def test_a_forked_child_holds_nothing_of_its_parents(store: WeightStore) -> None:
    def produce(builder: WeightBuilder) -> None:
        builder.put("x", np.zeros(3))

    weights = store.get(key("a"), produce)
    ready, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"1")
        os.read(go_on[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    assert not store.discard(key("a"))
    weights.close()
    gone = store.discard(key("a"))
    os.write(go_on[1], b"1")
    assert os.waitpid(child, 0)[1] == 0
    assert gone
