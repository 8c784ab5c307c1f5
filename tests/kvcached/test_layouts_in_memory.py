"""Every layout on every device: data written through its views is read back, and no more memory is
resident than it reports."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from kvcached import Client, Device, KVCache, KVLayout, errors

from .arrays import as_array
from .conftest import EVERY_DEVICE
from .models import LAYOUTS, SHAPES

PAGE = 4096
pytestmark = EVERY_DEVICE
EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


@pytest.fixture
def small_device(device_name: str, libcuda: object) -> Iterator[Device]:
    """Yields a device of 16 MiB with pages of 4 KiB."""
    namespace = f"t{uuid4().hex[:10]}"
    opened = Device.open(device_name, capacity_bytes=16 << 20, page_bytes=PAGE, namespace=namespace)
    yield opened
    Device.unlink(namespace, device_name)


@pytest.fixture
def client(small_device: Device) -> Iterator[Client]:
    with small_device.client("test", background=False) as opened:
        yield opened


def tensors(kv: KVCache) -> dict[tuple[int, str], Any]:
    """Returns each part of each layer by blocks."""
    return {
        (part.layer, part.name): as_array(kv.blocks(part.layer, part.name))
        for part in kv.layout.parts
    }


def by_tokens(kv: KVCache) -> dict[tuple[int, str], Any]:
    """Returns each part of each layer by tokens, if the layout has such views."""
    try:
        return {
            (part.layer, part.name): as_array(kv.buffer(part.layer, part.name))
            for part in kv.layout.parts
        }
    except errors.InvalidArgumentError:
        assert kv.layout.arrangement == "block_interleaved"
        assert kv.layout.block_tokens > 1
        return {}


class DenseStore:
    """Model of the cache: a plain array for each block."""

    def __init__(self, kv: KVCache, seed: int) -> None:
        self.kv, self.views, self.rows = kv, tensors(kv), by_tokens(kv)
        self.noise = np.random.default_rng(seed)
        self.held: dict[int, dict[tuple[int, str], Any]] = {}

    def write(self, block: int) -> None:
        self.held[block] = {}
        for key, view in self.views.items():
            bits = self.noise.bytes(view[block].nbytes)
            tensor = np.frombuffer(bits, dtype=view.dtype).reshape(view.shape[1:])
            self.held[block][key] = tensor
            view[block] = tensor

    def check(self, block: int) -> None:
        first, count = block * self.kv.layout.block_tokens, self.kv.layout.block_tokens
        for key, tensor in self.held[block].items():
            assert self.views[key][block].tobytes() == tensor.tobytes()
            if key in self.rows:
                assert self.rows[key][first : first + count].tobytes() == tensor.tobytes()


@EVERY_LAYOUT
def test_what_is_written_is_read_back(client: Client, layout: KVLayout) -> None:
    slab_blocks = layout.slab_tokens(PAGE) // layout.block_tokens
    kv = client.alloc_kvcache(layout, 4 * layout.slab_tokens(PAGE))
    store, draw = DenseStore(kv, seed=1), random.Random(2)
    store.write(0)  # padding
    for _ in range(12):
        wanted = min(draw.randint(1, slab_blocks), 40)
        if (ids := kv.alloc_kv(wanted)) is not None:
            for block in ids.tolist():
                assert block not in store.held
                store.write(block)
        live = [block for block in store.held if block != 0]
        gone = draw.sample(live, len(live) // 2)
        for block in gone:
            store.check(block)
            del store.held[block]
        kv.free_kv(np.array(gone, dtype=np.int64))
        for block in store.held:
            store.check(block)
    kv.check_integrity()


@EVERY_LAYOUT
def test_the_quantum_is_what_a_slab_makes_resident(
    small_device: Device, client: Client, layout: KVLayout
) -> None:
    kv = client.alloc_kvcache(layout, 3 * layout.slab_tokens(PAGE), reserved_blocks=0)
    slab_blocks = layout.slab_tokens(PAGE) // layout.block_tokens
    assert small_device.resident_bytes() == 0
    for slabs in (1, 2):
        ids = kv.alloc_kv(1)
        assert kv.mapped_bytes() == slabs * layout.quantum_bytes(PAGE)
        rest = kv.alloc_kv(slab_blocks - 1)
        for blocks in (ids, rest):
            for view in tensors(kv).values():
                view[blocks] = 1
        assert small_device.resident_bytes() == slabs * layout.quantum_bytes(PAGE)
        assert kv.missing_pages(1) == layout.quantum_bytes(PAGE) // PAGE
    assert kv.free_mapped_blocks() == 0


@EVERY_LAYOUT
def test_blocks_lie_on_mapped_pages_alone(client: Client, layout: KVLayout) -> None:
    """Ends this process if a block is outside of them."""
    kv = client.alloc_kvcache(layout, 8 * layout.slab_tokens(PAGE), reserved_blocks=0)
    slab_blocks = layout.slab_tokens(PAGE) // layout.block_tokens
    held = [kv.alloc_kv(slab_blocks) for _ in range(5)]
    kv.free_kv(held[1])
    kv.free_kv(held[3])
    assert kv.mapped_bytes() == 3 * layout.quantum_bytes(PAGE)
    for ids in (held[0], held[2], held[4]):
        for view in tensors(kv).values():
            view[ids] = 1
            assert (view[ids] == 1).all()


def test_views_say_how_they_lie(client: Client) -> None:
    layout = LAYOUTS["mha-token_interleaved"]
    kv = client.alloc_kvcache(layout, 1000)
    assert kv.k_buffer(1).shape == (kv.num_tokens, 4, 16)
    assert kv.v_buffer(1).strides == (3 * 2 * 4 * 16, 16, 1)
    assert kv.v_blocks(2).shape == (kv.num_blocks, 4, 4, 16)
    assert kv.k_blocks(0).strides == (4 * 3 * 2 * 4 * 16, 3 * 2 * 4 * 16, 16, 1)
    blocks = client.alloc_kvcache(LAYOUTS["mha-block_interleaved"], 1000).k_blocks(0)
    assert blocks.strides == (4 * 3 * 2 * 4 * 16, 4 * 16, 16, 1)


def test_parts_that_a_layer_lacks(client: Client) -> None:
    latent = client.alloc_kvcache(SHAPES["mla"], 1000)
    with pytest.raises(
        errors.InvalidArgumentError, match="does not have a part 'v'; it has latent"
    ):
        latent.v_buffer(0)
    with pytest.raises(errors.InvalidArgumentError, match=r"layer 3 is not in 0\.\.2"):
        latent.buffer(3, "latent")
    assert latent.buffer(2, "latent").shape == (latent.num_tokens, 1, 80)
    blocks = client.alloc_kvcache(LAYOUTS["mqa-block_interleaved"], 1000)
    with pytest.raises(errors.InvalidArgumentError, match="use the view by blocks"):
        blocks.k_buffer(0)


def test_numpy_has_no_type_of_eight_bit_floats(client: Client, device_name: str) -> None:
    kv = client.alloc_kvcache(SHAPES["e4m3"], 1000)
    with pytest.raises((RuntimeError, BufferError)):
        np.from_dlpack(kv.k_buffer(0))
    assert as_array(kv.k_buffer(0)).dtype == np.uint8
