"""Hybrid models: pools of one model on one budget, a window that slides, all or nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcached import Client, Device, HybridLayout, KVCacheGroup, Layout, errors

from .arrays import as_array
from .conftest import CAPACITY, EVERY_DEVICE, PAGE
from .libcuda import LibCuda

pytestmark = EVERY_DEVICE

# Like Gemma 3: five layers with a window to one without. A slab holds 8 blocks of 16 tokens.
ALL = Layout(num_layers=6, num_kv_heads=1, head_dim=128, dtype="float32", block_tokens=16)
WINDOW = 256
HYBRID = HybridLayout.sliding(ALL, [0, 1, 2, 3, 4], WINDOW)
FULL_QUANTUM, WINDOW_QUANTUM = (g.layout.quantum_bytes(PAGE) for g in HYBRID.groups)
SLAB_BLOCKS = 8


@pytest.fixture
def client(device: Device):  # type: ignore[no-untyped-def]
    with device.client("test", background=False) as opened:
        yield opened


@pytest.fixture
def group(client: Client) -> KVCacheGroup:
    return client.alloc_kvcache(HYBRID, 1 << 16)


def state(group: KVCacheGroup, device: Device) -> tuple[object, ...]:
    group.check_integrity()
    usage = device.usage()
    pools = [(p.live_blocks(), p.mapped_bytes()) for p in group.pools.values()]
    return (*pools, usage.reserved_bytes, usage.committed_bytes)


def test_layers_find_their_pools(group: KVCacheGroup) -> None:
    for layer in range(6):
        as_array(group.buffer(layer, "k"))[0] = layer
        as_array(group.blocks(layer, "v"))[0, 1] = -layer
    assert [as_array(group["window"].k_buffer(i))[0, 0, 0] for i in range(5)] == [0, 1, 2, 3, 4]
    assert as_array(group["full"].v_buffer(0))[1, 0, 0] == -5
    with pytest.raises(errors.InvalidArgumentError, match="layer 6 is not in"):
        group.buffer(6, "k")
    with pytest.raises(errors.InvalidArgumentError, match="'all' is not a group"):
        group["all"]


def test_pools_have_ids_of_their_own_on_one_record(
    device: Device, client: Client, group: KVCacheGroup
) -> None:
    floor = group.floor_bytes()
    assert floor == FULL_QUANTUM + WINDOW_QUANTUM == client.usage().committed_bytes
    ids = group.alloc_kv({"full": 20, "window": 3})
    assert ids is not None
    assert list(ids) == ["full", "window"]
    assert len(set(ids["full"].tolist())) == 20
    assert ids["window"].tolist() == [1, 2, 3]
    assert len(device.usage().clients) == 1
    assert client.usage().committed_bytes == group.mapped_bytes() == floor + 2 * FULL_QUANTUM
    group.free_kv({"window": ids["window"][:2]})
    assert group.live_blocks() == {"full": 20, "window": 1}
    group.free_kv({"full": ids["full"], "window": ids["window"][2:]})
    assert group.mapped_bytes() == floor
    assert group.alloc_kv({}) == {}


class Sequence:
    """Request that writes a number into every layer of each token, and checks the live ones."""

    def __init__(self, group: KVCacheGroup, seed: int) -> None:
        self.group, self.noise, self.num_tokens = group, np.random.default_rng(seed), 0
        self.blocks: dict[str, list[int]] = {"full": [], "window": []}
        self.dropped = 0
        self.kept: dict[int, Any] = {}
        self.views = {
            layer: (as_array(group.blocks(layer, "k")), as_array(group.blocks(layer, "v")))
            for layer in range(6)
        }

    def grow(self, num_blocks: int) -> bool:
        ids = self.group.alloc_kv({"full": num_blocks, "window": num_blocks})
        if ids is None:
            return False
        for name, blocks in self.blocks.items():
            blocks.extend(ids[name].tolist())
        for index in range(len(self.blocks["full"]) - num_blocks, len(self.blocks["full"])):
            self.kept[index] = self.noise.standard_normal((6, 2, 16, 1, 128)).astype("float32")
            for layer in range(6):
                for which in range(2):
                    at = self.at(layer, index)
                    self.views[layer][which][at] = self.kept[index][layer, which]
        self.num_tokens += 16 * num_blocks
        return True

    def at(self, layer: int, index: int) -> int:
        if layer == 5:
            return self.blocks["full"][index]
        return self.blocks["window"][index - self.dropped]

    def slide(self) -> None:
        dead = HYBRID.group("window").dead_blocks(self.num_tokens) - self.dropped
        gone = self.blocks["window"][:dead]
        self.group.free_kv({"window": np.array(gone, dtype=np.int64)})
        self.blocks["window"] = self.blocks["window"][dead:]
        self.dropped += dead

    def check(self) -> None:
        for index, written in self.kept.items():
            for layer in range(6) if index >= self.dropped else [5]:
                for which in range(2):
                    seen = self.views[layer][which][self.at(layer, index)]
                    assert (seen == written[layer, which]).all()

    def end(self) -> None:
        self.group.free_kv(
            {name: np.array(blocks, dtype=np.int64) for name, blocks in self.blocks.items()}
        )


def test_a_window_slides_over_a_long_sequence(
    device: Device, client: Client, group: KVCacheGroup
) -> None:
    """Slides 50 times the window: its pool stays within the window, the other holds everything."""
    need = HYBRID.group("window").layout.need_bytes(
        HYBRID.group("window").live_tokens_max(1 << 16, step_tokens=16), PAGE
    )
    assert need == 3 * WINDOW_QUANTUM
    sequence = Sequence(group, seed=3)
    while sequence.num_tokens < 50 * WINDOW:
        assert sequence.grow(1)
        assert group["window"].mapped_bytes() <= need
        resident = group["full"].mapped_bytes() + need
        assert device.resident_bytes() <= resident
        sequence.slide()
        live_tokens = 16 * group.live_blocks()["window"]
        assert min(WINDOW, sequence.num_tokens) <= live_tokens <= WINDOW + 16
        if sequence.num_tokens % (10 * WINDOW) == 0:
            sequence.check()
    sequence.check()
    bound = HYBRID.need_bytes(sequence.num_tokens, PAGE, step_tokens=16)
    assert group.mapped_bytes() <= bound < 0.4 * ALL.need_bytes(sequence.num_tokens, PAGE)
    sequence.end()
    assert group.mapped_bytes() == group.floor_bytes()


def test_many_sequences_come_and_go(client: Client, group: KVCacheGroup) -> None:
    draw = np.random.default_rng(5)
    running: list[Sequence] = []
    refused = 0
    for step in range(150):
        if len(running) < 6:
            running.append(Sequence(group, seed=step))
        sequence = running[draw.integers(len(running))]
        refused += not sequence.grow(int(draw.integers(1, 12)))
        sequence.slide()
        sequence.check()
        if refused % 3 == 2 or sequence.num_tokens > 2000:
            running.remove(sequence)
            sequence.end()
        group.check_integrity()
        assert client.usage().committed_bytes == group.mapped_bytes()
    for sequence in running:
        sequence.check()
        sequence.end()
    assert group.mapped_bytes() == group.floor_bytes()


def test_no_room_for_one_is_no_room_for_any(
    device: Device, device_name: str, client: Client, group: KVCacheGroup, libcuda: LibCuda
) -> None:
    room = 4 * FULL_QUANTUM + 2 * WINDOW_QUANTUM
    client.set_limit(group.mapped_bytes() + room)
    assert group.alloc_kv({"full": 3, "window": 3}) is not None
    before = state(group, device)
    libcuda.reset()
    for full, window in ((4, 3), (10, 2), (0, 4)):
        wanted = {"full": full * SLAB_BLOCKS + 1, "window": window * SLAB_BLOCKS + 1}
        assert not group.can_alloc(wanted)
        assert group.alloc_kv(wanted) is None
        assert state(group, device) == before
    # Each alone would fit. Their sum does not, which takes no driver call.
    assert libcuda.count() == {}
    assert group.can_alloc({"full": 4 * SLAB_BLOCKS, "window": 2 * SLAB_BLOCKS})
    assert group.alloc_kv({"full": 4 * SLAB_BLOCKS, "window": 2 * SLAB_BLOCKS}) is not None
    assert client.usage().reserved_bytes == group.mapped_bytes() == client.usage().limit_bytes


def test_the_virtual_space_of_each_pool_is_a_bound(device: Device, client: Client) -> None:
    group = client.alloc_kvcache(HYBRID, 100, reserved_blocks=0)
    assert group.mapped_bytes() == 0
    for wanted in ({"full": 9, "window": 1}, {"window": 9, "full": 1}):
        assert not group.can_alloc(wanted)
        assert group.alloc_kv(wanted) is None
    assert device.usage().reserved_bytes == 0
    with pytest.raises(errors.InvalidArgumentError, match="num_blocks is -1"):
        group.alloc_kv({"full": 1, "window": -1})
    with pytest.raises(errors.InvalidArgumentError, match="'sink' is not a group"):
        group.alloc_kv({"full": 1, "sink": 1})
    assert group.live_blocks() == {"full": 0, "window": 0}


def test_a_space_for_one_pool_only_is_not_opened(device: Device) -> None:
    with device.client("poor", limit_bytes=FULL_QUANTUM) as poor:
        with pytest.raises(errors.NoRoomError):
            poor.alloc_kvcache(HYBRID, 1 << 12)
        assert poor.usage().reserved_bytes == 0


def test_bad_frees_change_no_pool(device: Device, group: KVCacheGroup) -> None:
    ids = group.alloc_kv({"full": 5, "window": 5})
    assert ids is not None
    before = state(group, device)
    some = ids["full"][:3]
    for bad, error in (
        (np.array([1, 1]), errors.DoubleFreeError),
        (np.array([6]), errors.DoubleFreeError),
        (np.array([0]), errors.UnknownBlockError),
        (np.array([1 << 40]), errors.UnknownBlockError),
        (np.array([1.0]), errors.InvalidArgumentError),
    ):
        for freed in ({"full": some, "window": bad}, {"window": bad, "full": some}):
            with pytest.raises(error):
                group.free_kv(freed)
            assert state(group, device) == before
    group.free_kv({"full": some[::2], "window": ids["window"]})
    assert group.live_blocks() == {"full": 3, "window": 0}


def test_spare_pages_of_one_pool_are_the_others(client: Client, group: KVCacheGroup) -> None:
    """Keeps the pages that a window frees, and gives them to the pool that needs them."""
    client.set_limit(group.mapped_bytes() + 6 * WINDOW_QUANTUM)
    pages = 6 * WINDOW_QUANTUM // PAGE
    group["window"].set_spare_pages(0, pages)
    ids = group.alloc_kv({"window": 6 * SLAB_BLOCKS})
    assert ids is not None
    assert group.alloc_kv({"full": SLAB_BLOCKS}) is None
    group.free_kv(ids)
    assert client.usage().reserved_bytes == client.usage().limit_bytes
    assert not group.can_alloc({"full": SLAB_BLOCKS, "window": SLAB_BLOCKS})
    assert group.alloc_kv({"full": 10 * SLAB_BLOCKS, "window": 2 * SLAB_BLOCKS}) is not None
    assert group.mapped_bytes() <= CAPACITY
    assert group.trim() == 0


def test_a_freed_group_is_closed(device: Device, client: Client, group: KVCacheGroup) -> None:
    client.free_kvcache(group)
    assert device.usage().reserved_bytes == 0
    with pytest.raises(errors.ClosedError):
        group.alloc_kv({"full": 1})
