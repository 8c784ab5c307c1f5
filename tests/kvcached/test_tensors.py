"""Virtual tensors, and how all memory reaches other frameworks."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from kvcached import Client, Device, Layout, errors
from kvcached.layouts import ARRANGEMENTS, Arrangement

from .arrays import as_array
from .conftest import CAPACITY, EVERY_DEVICE, PAGE, TINY


@pytest.fixture
def client(device: Device):  # type: ignore[no-untyped-def]
    with device.client("test") as opened:
        yield opened


@EVERY_DEVICE
def test_map_touch_unmap(device: Device, client: Client) -> None:
    tensor = client.alloc_virtual_tensor(1 << 40)
    assert device.resident_bytes() == 0
    tensor.map(1 << 30, 8 * PAGE)
    values = as_array(tensor.view([8 * PAGE // 4], "float32", 1 << 30))
    values[:] = 1.5
    assert device.resident_bytes() == tensor.mapped_bytes == 8 * PAGE
    tensor.unmap((1 << 30) + PAGE, 6 * PAGE)
    assert device.resident_bytes() == tensor.mapped_bytes == 2 * PAGE
    assert values[0] == values[-1] == 1.5
    client.free_virtual_tensor(tensor)
    assert device.resident_bytes() == device.usage().committed_bytes == 0
    with pytest.raises(errors.ClosedError):
        tensor.map(0, PAGE)


def test_new_pages_hold_no_old_data(client: Client) -> None:
    tensor = client.alloc_virtual_tensor(PAGE)
    for _ in range(2):
        tensor.map(0, PAGE)
        data = as_array(tensor)
        assert not data.any()
        data[:] = 255
        tensor.unmap(0, PAGE)


@EVERY_DEVICE
def test_bad_ranges_change_nothing(device: Device, client: Client) -> None:
    for size, error in ((0, "is 0"), (-PAGE, "is -"), (PAGE + 1, "multiples"), (1 << 62, "pages")):
        with pytest.raises(errors.InvalidArgumentError, match=error):
            client.alloc_virtual_tensor(size)
    tensor = client.alloc_virtual_tensor(4 * PAGE)
    tensor.map(PAGE, PAGE)
    cases = [
        (tensor.map, 0, 2 * PAGE, errors.AlreadyMappedError),
        (tensor.unmap, 0, 2 * PAGE, errors.NotMappedError),
        (tensor.map, 0, 0, errors.InvalidArgumentError),
        (tensor.map, 1, PAGE, errors.AlignmentError),
        (tensor.unmap, PAGE, PAGE - 1, errors.AlignmentError),
        (tensor.map, 3 * PAGE, 2 * PAGE, errors.InvalidArgumentError),
        (tensor.unmap, -PAGE, PAGE, errors.InvalidArgumentError),
    ]
    for call, offset, size, error in cases:
        with pytest.raises(error):
            call(offset, size)
    assert tensor.mapped_bytes == device.usage().committed_bytes == PAGE


@EVERY_DEVICE
def test_views_are_checked(client: Client) -> None:
    tensor = client.alloc_virtual_tensor(PAGE)
    for shape, dtype, offset in (
        ([PAGE + 1], "uint8", 0),
        ([PAGE // 4], "float32", 4),
        ([1], "float32", 2),
        ([2**62, 2**62], "float64", 0),
        ([], "uint8", 0),
        ([0], "uint8", 0),
    ):
        with pytest.raises(errors.InvalidArgumentError):
            tensor.view(shape, dtype, offset)
    with pytest.raises(errors.InvalidArgumentError, match="'int4' is not supported; use float32"):
        tensor.view([1], "int4")


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int8", "uint8", "int64"])
def test_numpy_shares_the_memory(client: Client, dtype: str) -> None:
    tensor = client.alloc_virtual_tensor(PAGE)
    tensor.map(0, PAGE)
    first, second = (as_array(tensor.view([4, 5, 6], dtype)) for _ in range(2))
    assert first.dtype == np.dtype(dtype)
    assert first.shape == (4, 5, 6)
    first[3, 4, 5] = 7
    assert second[3, 4, 5] == 7


def test_an_export_outlives_its_maker(device: Device) -> None:
    client = device.client("test")
    tensor = client.alloc_virtual_tensor(PAGE)
    tensor.map(0, PAGE)
    data = as_array(tensor)
    capsules = [tensor.__dlpack__(), tensor.__dlpack__(max_version=(1, 0))]
    del tensor, client, capsules
    gc.collect()
    assert device.usage().free_bytes == CAPACITY
    del data
    gc.collect()


def test_a_copy_or_another_device_is_refused(client: Client) -> None:
    view = client.alloc_virtual_tensor(PAGE).view([1], "uint8")
    with pytest.raises(BufferError, match="copy"):
        view.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="CPU"):
        view.__dlpack__(dl_device=(2, 0))
    assert view.__dlpack_device__() == (1, 0)
    assert (view.shape, view.dtype) == ((1,), "uint8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_torch_shares_the_memory(client: Client, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    layout = Layout(num_layers=2, num_kv_heads=2, head_dim=64, dtype=dtype)
    kv = client.alloc_kvcache(layout, 1 << 12)
    keys = torch.from_dlpack(kv.k_buffer(1))
    assert keys.dtype == getattr(torch, dtype)
    assert keys.shape == (kv.num_tokens, 2, 64)
    keys[0] = 3
    assert torch.from_dlpack(kv.k_buffer(1))[0].eq(3).all()
    assert torch.from_dlpack(kv.v_buffer(1))[0].eq(0).all()


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float32"])
def test_torch_sees_types_and_strides(client: Client, dtype: str, arrangement: Arrangement) -> None:
    torch = pytest.importorskip("torch")
    layout = Layout(3, 4, 16, dtype=dtype, block_tokens=4, arrangement=arrangement)
    kv = client.alloc_kvcache(layout, 1000)
    view = kv.v_blocks(2)
    tensor = torch.from_dlpack(view)
    assert tensor.dtype == getattr(torch, dtype)
    assert (tuple(tensor.shape), tensor.stride()) == (view.shape, view.strides)
    tensor[0] = 1.5
    assert torch.from_dlpack(kv.v_blocks(2))[0].to(torch.float32).eq(1.5).all()
    assert torch.from_dlpack(kv.k_blocks(2))[0].to(torch.float32).eq(0).all()


@EVERY_DEVICE
def test_buffers_of_a_cache_do_not_overlap(client: Client) -> None:
    kv = client.alloc_kvcache(TINY, 1 << 10)
    buffers = [as_array(view(layer)) for layer in range(2) for view in (kv.k_buffer, kv.v_buffer)]
    for index, buffer in enumerate(buffers):
        buffer[: TINY.block_tokens] = index
    for index, buffer in enumerate(buffers):
        assert (buffer[: TINY.block_tokens] == index).all()
        assert buffer.shape == (kv.num_tokens, 2, 64)
