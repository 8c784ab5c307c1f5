"""Weights over the host links of all GPUs of the machine, read back through the driver.

With one GPU only its own link is tested. `-s` shows the bytes of each link.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from kvcached import Client, Device, WeightArena, WeightKey, WeightLinks, WeightStore
from kvcached.errors import BackendUnavailableError

PAGE = 2 << 20
CAPACITY = 64 * PAGE
SIZES = [20 << 20, 9_999_999, 31 << 20]
pytestmark = pytest.mark.usefixtures("gpu")


class Reader:
    """Copies device memory of cuda:0 to the host."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxPushCurrent_v2", context)
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        self.devices = count.value

    def _call(self, name: str, *arguments: object) -> None:
        assert getattr(self._cuda, name)(*arguments) == 0, name

    def read(self, address: int, size_bytes: int) -> bytes:
        content = ctypes.create_string_buffer(size_bytes)
        self._call(
            "cuMemcpyDtoH_v2", content, ctypes.c_uint64(address), ctypes.c_size_t(size_bytes)
        )
        return content.raw

    def close(self) -> None:
        self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        self._call("cuDevicePrimaryCtxRelease_v2", 0)


def test_all_links_fill_one_gpu(namespace: str, tmp_path: Path) -> None:
    reader = Reader()
    devices = [
        Device.open(f"cuda:{n}", capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=namespace)
        for n in range(reader.devices)
    ]
    clients = [device.client("links") for device in devices]
    content = [np.random.default_rng(0).integers(0, 256, size, np.uint8) for size in SIZES]
    store = WeightStore.open(tmp_path / "store", max_bytes=2 * sum(SIZES))
    key = WeightKey("gpu-test", "gpu-test", "uint8")
    with store.get(key, lambda b: [b.put(f"t{n}", x) for n, x in enumerate(content)]) as weights:
        links = clients[0].open_weight_links()
        helpers = [client for client in clients[1:] if _helps(links, client)]
        arena = clients[0].alloc_weights(weights.layout(), "gpu-test")
        loading = arena.start_load(weights, links=links)
        loading.result()
        print(f"{len(helpers)} of {len(clients) - 1} other GPUs help: {loading.link_bytes}")
        assert len(loading.link_bytes) == 1 + len(helpers)
        assert sum(loading.link_bytes.values()) == sum(SIZES)
        assert loading.lost_links == {}
        _compare(reader, arena, content)
        arena.free()
        links.close()
    for client, device in zip(clients, devices, strict=True):
        assert client.usage().reserved_bytes == 0
        client.close()
        device.destroy()
    reader.close()


def _helps(links: WeightLinks, client: Client) -> bool:
    """Returns False for GPUs without a link (another socket, no NVLink and no peer access)."""
    try:
        links.add(client)
    except BackendUnavailableError as error:
        print(error)
        return False
    return True


def _compare(reader: Reader, arena: WeightArena, content: list[np.ndarray]) -> None:
    for n, expected in enumerate(content):
        assert reader.read(arena[f"t{n}"].address, expected.nbytes) == expected.tobytes()
