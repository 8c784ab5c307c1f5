"""Wrong arguments, which every public call refuses with an exception of kvcached."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcached import Device, KvcachedError, TensorSpec, WeightBuilder, WeightKey, errors

from .compiling import ROOT
from .public_calls import ENDING, WRONG, World, is_wrong, other_errors

ROUNDS = 4000


@pytest.fixture
def world(device: Device, tmp_path: Path) -> Iterator[World]:
    made = World(device, tmp_path)
    yield made
    made.weights.close()
    made.client.close()
    made.other.close()


def test_one_wrong_argument_is_refused(world: World) -> None:
    missed = []
    for name, call in world.calls():
        for parameter, annotation in call.annotations.items():
            for value in (value for value in WRONG if is_wrong(annotation, value)):
                if value is True and name.endswith(("KVCache.alloc_kv", "RankKV.alloc_kv")):
                    continue  # counts as 1: the call is hot
                what = f"{name}({parameter}: {annotation} = {_shown(value)})"
                try:
                    call({**call.right, parameter: value})
                    missed.append(f"{what} was accepted")
                except KvcachedError:
                    pass
                except Exception as error:  # noqa: BLE001 (the subject of the test)
                    missed.append(f"{what} raised {error!r}")
    assert not missed, "\n".join(missed)


def test_many_wrong_arguments_raise_nothing_else(world: World) -> None:
    calls = [(name, call) for name, call in world.calls() if name not in ENDING]
    chooser = random.Random(11)
    missed = []
    for _ in range(ROUNDS):
        name, call = chooser.choice(calls)
        wrong = {each: chooser.choice(WRONG) for each in call.right if chooser.random() < 0.5}
        try:
            call({**call.right, **wrong})
        except KvcachedError:
            pass
        except Exception as error:  # noqa: BLE001 (the subject of the test)
            shown = {each: _shown(value) for each, value in wrong.items()}
            missed.append(f"{name}({shown}) raised {error!r}")
    assert not missed, "\n".join(missed)


def test_closed_objects_say_so(world: World) -> None:
    calls = list(world.calls())
    for closed in (world.weights, world.links, world.client, world.other, world.device):
        closed.close()
    missed = other_errors(calls)
    assert not missed, "\n".join(missed)


def test_freed_objects_say_so(world: World) -> None:
    """Raises instead of a view of addresses without memory, where a read is a SIGSEGV."""
    views = [
        (world.kv.k_buffer, (0,)),
        (world.kv.v_blocks, (0,)),
        (world.group["full"].k_buffer, (0,)),
        (world.tensor.view, ([4], "float32")),
        (world.tensor.__dlpack__, ()),
        (world.arena.view, ("w", "float32")),
    ]
    for make, arguments in views:
        make(*arguments)
    world.client.free_kvcache(world.kv)
    world.client.free_kvcache(world.group)
    world.client.free_virtual_tensor(world.tensor)
    world.client.free_weights(world.arena)
    for make, arguments in views:
        with pytest.raises(errors.ClosedError):
            make(*arguments)


def test_a_process_without_descriptors_raises_nothing_else(namespace: str, tmp_path: Path) -> None:
    """Covers calls that import a module."""
    command = [sys.executable, "-m", "tests.kvcached.no_descriptors", namespace, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    Device.unlink(namespace, "host:0", force=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_a_builder_refuses_wrong_tensors(world: World) -> None:
    good = np.zeros(4, np.float32)
    wrong = [value for value in WRONG if not isinstance(value, np.ndarray | bytes | bool | str)]

    def produce(builder: WeightBuilder) -> None:
        for value in wrong:
            with pytest.raises(KvcachedError):
                builder.put(value, good)
            with pytest.raises(KvcachedError):
                builder.put("array", value)
            with pytest.raises(KvcachedError):
                builder.put_bytes("spec", value, [b""])
            if value not in ([], (), {}):
                with pytest.raises(KvcachedError):
                    builder.put_bytes("chunks", TensorSpec("uint8", (1,)), value)
        no_bytes: tuple[Any, ...] = ([1], ["x"], [None], [[]])
        for chunks in no_bytes:
            with pytest.raises(KvcachedError):
                builder.put_bytes(f"chunks {chunks}", TensorSpec("uint8", (1,)), chunks)
        builder.put("good", good)

    with world.store.get(WeightKey("other", "engine", "float32"), produce) as made:
        assert set(made.specs) == {"good"}


def test_what_is_another_clients_is_not_freed(world: World) -> None:
    """Refuses objects of another kind too: a KV cache is not a tensor."""
    free = {
        world.client.free_kvcache: world.kv,
        world.client.free_virtual_tensor: world.tensor,
        world.client.free_weights: world.arena,
    }
    before = world.device.usage()
    for freeing, own in free.items():
        foreign = getattr(world.other, freeing.__name__)
        with pytest.raises(
            errors.InvalidArgumentError, match="belongs to another client; free it there"
        ):
            foreign(own)
        for wrong in (*(each for each in free.values() if each is not own), None):
            with pytest.raises(errors.InvalidArgumentError, match="must be a"):
                freeing(wrong)
    assert world.device.usage() == before
    assert world.kv.live_blocks() == 2
    for freeing, own in free.items():
        freeing(own)


def _shown(value: object) -> str:
    return "10^5000" if isinstance(value, int) and value > 2**70 else repr(value)
