"""Arenas: leased before use, filled by streaming, whole or nothing."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from kvcached import (
    Client,
    Device,
    Layout,
    LoadOptions,
    TensorSpec,
    WeightBuilder,
    WeightKey,
    WeightLayout,
    WeightStore,
    errors,
)

from .conftest import CAPACITY, PAGE
from .models import Tensors, arena_arrays, assert_same, tensors

SMALL = WeightLayout.of({"x": TensorSpec("float32", (PAGE // 4,))})


def put(store: WeightStore, made: Tensors, name: str = "m") -> WeightKey:
    def produce(builder: WeightBuilder) -> None:
        for tensor, array in made.items():
            builder.put(tensor, array)

    key = WeightKey(name, "engine-1", "any")
    store.get(key, produce).close()
    return key


def big(megabytes: int) -> Tensors:
    rng = np.random.default_rng(megabytes)
    return {"big": rng.integers(0, 256, megabytes << 20, dtype=np.uint8)}


def held(device: Device) -> tuple[int, int]:
    """Returns (static bytes in the ledger, resident bytes)."""
    return device.usage().static_bytes, device.resident_bytes()


def test_layouts_are_aligned() -> None:
    layout = WeightLayout.of({name: TensorSpec("int8", (3,)) for name in "abc"})
    assert dict(layout.offsets_bytes) == {"a": 0, "b": 256, "c": 512}
    assert layout.size_bytes == 515
    packed = WeightLayout.of(layout.specs, alignment_bytes=1)
    assert packed.size_bytes == 9
    with pytest.raises(errors.InvalidArgumentError, match="specs is empty"):
        WeightLayout.of({})
    with pytest.raises(errors.InvalidArgumentError, match="dtype 'int3' is not supported"):
        TensorSpec("int3", (1,))


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 1000, 4096])
def test_every_tensor_arrives(
    store: WeightStore, device: Device, client: Client, chunk_bytes: int
) -> None:
    made = tensors()
    with store.find(put(store, made)) as weights:
        arena = client.alloc_weights(weights.layout(), "m")
        assert held(device) == (arena.size_bytes, 0)
        assert arena.size_bytes % PAGE == 0
        arena.load(weights, LoadOptions(chunk_bytes=chunk_bytes))
    assert_same(arena_arrays(arena), made)
    static_bytes, resident_bytes = held(device)
    assert static_bytes == arena.size_bytes == arena.backed_bytes
    assert arena.layout.size_bytes <= resident_bytes <= static_bytes
    assert all(arena[name].address % 256 == 0 for name in arena)
    arena.free()
    arena.free()
    assert held(device) == (0, 0)
    with pytest.raises(errors.ClosedError):
        arena["embed"]


def test_torch_parameters_are_views(store: WeightStore, client: Client) -> None:
    torch = pytest.importorskip("torch")
    made = {"w": torch.randn(8, 16, dtype=torch.bfloat16), "f8": torch.zeros(4, dtype=torch.uint8)}
    key = WeightKey("m", "torch", "bfloat16")

    def produce(builder: WeightBuilder) -> None:
        builder.put("w", made["w"])
        builder.put("f8", made["f8"], dtype="float8_e5m2")

    with store.get(key, produce) as weights:
        arena = client.alloc_weights(weights.layout(), "m")
        model = torch.nn.Linear(16, 8, bias=False, device="meta", dtype=torch.bfloat16)
        view = torch.from_dlpack(arena["w"])
        model.weight = torch.nn.Parameter(view, requires_grad=False)
        arena.load(weights)
    assert torch.equal(model.weight, made["w"])
    assert model.weight.data_ptr() == arena["w"].address
    raw = torch.from_dlpack(arena.view("f8", "uint8")).view(torch.float8_e5m2)
    assert raw.shape == (4,)
    arena.free()


def test_an_engine_may_write_the_tensors_itself(device: Device, client: Client) -> None:
    arena = client.alloc_weights(SMALL, "m")
    assert arena.backed_bytes == 0
    arena.back()
    assert arena.backed_bytes == PAGE
    np.from_dlpack(arena["x"])[:] = 1
    client.free_weights(arena)
    assert held(device) == (0, 0)


def test_no_room_says_how_much_is_missing(device: Device, client: Client) -> None:
    layout = WeightLayout.of({"x": TensorSpec("uint8", (CAPACITY,))})
    other = client.reserve_static(3 * PAGE, "workspace")
    with pytest.raises(errors.NoRoomError) as refused:
        client.alloc_weights(layout, "m")
    error = refused.value
    assert error.need_bytes - error.free_bytes == 3 * PAGE
    assert held(device) == (3 * PAGE, 0)
    other.release()
    client.alloc_weights(layout, "m").free()


def test_spare_pages_of_kv_make_room_for_weights(device: Device, client: Client) -> None:
    kv = client.alloc_kvcache(Layout(num_layers=1, num_kv_heads=1, head_dim=64), 1 << 16)
    kv.set_spare_pages(100, 100)
    kv.free_kv(kv.alloc_kv(1000))
    assert device.usage().committed_bytes > kv.floor_bytes()
    rest = CAPACITY - kv.floor_bytes()
    arena = client.alloc_weights(WeightLayout.of({"x": TensorSpec("uint8", (rest,))}), "m")
    assert device.usage().free_bytes == 0
    arena.free()


@pytest.mark.parametrize(
    "change",
    [{"extra": TensorSpec("int8", (1,))}, {"embed": TensorSpec("float16", (64, 1000))}],
)
def test_other_tensors_are_refused_before_a_byte_is_copied(
    store: WeightStore, client: Client, change: dict[str, TensorSpec]
) -> None:
    with store.find(put(store, tensors())) as weights:
        arena = client.alloc_weights(WeightLayout.of({**weights.specs, **change}), "m")
        with pytest.raises(errors.WeightMismatchError, match="the weights for m"):
            arena.load(weights)
        assert arena.backed_bytes == 0
        arena.free()


def test_a_cancelled_load_leaves_nothing_leased(
    store: WeightStore, device: Device, client: Client
) -> None:
    with store.find(put(store, big(8))) as weights:
        arena = client.alloc_weights(weights.layout(), "m")
        load = arena.start_load(weights, LoadOptions(bytes_per_s=1 << 20))
        while load.started_bytes == 0:
            time.sleep(0.001)
        assert not load.done()
        with pytest.raises(errors.InvalidArgumentError, match="under way"):
            arena.start_load(weights)
        load.cancel()
        with pytest.raises(errors.LoadCancelledError):
            load.result()
        assert load.started_bytes < load.total_bytes == 8 << 20
        assert held(device) == (0, 0)
        again = client.alloc_weights(weights.layout(), "m")
        again.load(weights)
        assert_same(arena_arrays(again), big(8))
        again.free()


def test_freeing_an_arena_ends_its_load(store: WeightStore, device: Device, client: Client) -> None:
    with store.find(put(store, big(8))) as weights:
        arena = client.alloc_weights(weights.layout(), "m")
        load = arena.start_load(weights, LoadOptions(bytes_per_s=1 << 20))
        arena.free()
        assert load.done()
        assert held(device) == (0, 0)
        with pytest.raises(errors.LoadCancelledError):
            load.result()


def test_a_rate_is_kept(store: WeightStore, client: Client) -> None:
    """Loads 1 MiB at 4 MiB/s in no less than its share of time, on an idle or busy machine."""
    with store.find(put(store, big(1))) as weights:
        arena = client.alloc_weights(weights.layout(), "m")
        begin_s = time.monotonic()
        arena.load(weights, LoadOptions(bytes_per_s=4 << 20))
        elapsed_s = time.monotonic() - begin_s
        arena.free()
    assert elapsed_s > 0.9 * 0.25


@pytest.mark.parametrize("when", ["before", "in mid-load"])
@pytest.mark.parametrize("what", ["removed", "truncated"])
def test_a_stored_file_that_vanishes_ends_the_load_by_name(
    store: WeightStore, device: Device, client: Client, what: str, when: str
) -> None:
    with store.find(put(store, big(8))) as weights:
        path = weights.path("big")
        arena = client.alloc_weights(weights.layout(), "m")
        options = LoadOptions(threads=1, chunk_bytes=1 << 20, bytes_per_s=16 << 20)
        load = arena.start_load(weights, options) if when != "before" else None
        while load is not None and load.started_bytes == 0:
            time.sleep(0.001)
        if what == "removed":
            path.unlink()
        else:
            os.truncate(path, 1000)
        with pytest.raises(errors.WeightFileError, match=str(path)):
            (load or arena.start_load(weights, options)).result()
        assert held(device) == (0, 0)


def test_space_is_laid_out_again_without_reserving_anew(
    store: WeightStore, device: Device, client: Client
) -> None:
    client.reserve_addresses(4096 * PAGE)
    space = client.addresses()
    assert space is not None
    assert (space.size_bytes, space.free_bytes) == (4096 * PAGE, 4096 * PAGE)
    layouts = [
        Layout(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float32"),
        Layout(num_layers=5, num_kv_heads=1, head_dim=96, dtype="bfloat16"),
    ]
    keys = [put(store, tensors(0, layers=4), "a"), put(store, tensors(1, layers=9), "b")]
    seen = []
    for turn in range(6):
        with store.find(keys[turn % 2]) as weights:
            arena = client.alloc_weights(weights.layout(), "m")
            kv = client.alloc_kvcache(layouts[turn % 2], 1 << 12)
            arena.load(weights)
            ids = kv.alloc_kv(3)
            addresses = [arena["embed"].address, kv.k_buffer(0).address]
            seen.append(addresses)
            used = client.addresses()
            assert used is not None
            assert used.free_bytes < space.free_bytes
            assert_same(arena_arrays(arena), tensors(turn % 2, layers=4 if turn % 2 == 0 else 9))
            kv.free_kv(ids)
        client.free_weights(arena)
        client.free_kvcache(kv)
        del kv, arena
        assert client.addresses() == space
        assert held(device) == (0, 0)
    # The same model gets the same addresses, so references to them stay valid.
    assert seen[0] == seen[2] == seen[4]
    assert seen[1] == seen[3] == seen[5]


def test_a_view_keeps_its_addresses_from_the_next_model(client: Client) -> None:
    client.reserve_addresses(4 * PAGE)
    first = client.alloc_weights(SMALL, "a")
    view = first["x"]
    first.free()
    del first
    second = client.alloc_weights(SMALL, "b")
    assert second["x"].address != view.address
    second.free()
    address = view.address
    del view, second
    third = client.alloc_weights(SMALL, "c")
    assert third["x"].address == address
    third.free()


def test_what_finds_no_range_gets_addresses_of_its_own(client: Client) -> None:
    client.reserve_addresses(PAGE)
    arenas = [client.alloc_weights(SMALL, str(n)) for n in range(3)]
    space = client.addresses()
    assert space is not None
    assert space.free_bytes == 0
    for n, arena in enumerate(arenas):
        arena.back()
        np.from_dlpack(arena["x"])[:] = n
    assert [np.from_dlpack(arena["x"])[0] for arena in arenas] == [0, 1, 2]
    with pytest.raises(errors.InvalidArgumentError, match="has an address space"):
        client.reserve_addresses(PAGE)
    for arena in arenas:
        arena.free()


def test_addresses_are_pages(client: Client) -> None:
    with pytest.raises(errors.AlignmentError):
        client.reserve_addresses(PAGE + 1)
    assert client.addresses() is None


def test_closing_the_client_frees_its_arenas(device: Device) -> None:
    client = device.client("short")
    arena = client.alloc_weights(SMALL, "m")
    arena.back()
    client.close()
    assert device.usage().clients == ()
    arena.free()
    with pytest.raises(errors.ClosedError):
        client.alloc_weights(SMALL, "m")


@pytest.mark.parametrize(
    "bad", [{"threads": 0}, {"chunk_bytes": 0}, {"bytes_per_s": 0}, {"bytes_per_s": -1}]
)
def test_options_are_checked(bad: dict[str, int]) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=next(iter(bad))):
        LoadOptions(**bad)
