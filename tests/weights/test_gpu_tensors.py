"""Tensors in a GPU's memory: stored, filled, read back. The test libcuda's memory is out of the
CPU's reach and holds garbage when it is fresh."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcached import (
    Client,
    Device,
    TensorSpec,
    WeightArena,
    WeightKey,
    WeightLayout,
    WeightStore,
    errors,
)
from kvcached.testing import read_tensor
from kvcached.weights.tensor_reader import PIECE_BYTES
from tests.kvcached.compiling import build_libcuda
from tests.kvcached.libcuda import CudaStream, LibCuda

PAGE = 64 << 10
KEY = WeightKey("model", "test", "bfloat16")
SPECS = {
    "half": TensorSpec("bfloat16", (3, 5)),
    "full": TensorSpec("float32", (1000, 7)),
    "none": TensorSpec("float32", (0,)),
}


@pytest.fixture
def libcuda(monkeypatch: pytest.MonkeyPatch) -> LibCuda:
    path = build_libcuda()
    monkeypatch.setenv("KVCACHED_LIBCUDA", str(path))
    return LibCuda(path)


@pytest.fixture(params=["cuda:0", "host:0"])
def device_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(libcuda: LibCuda, namespace: str, device_name: str) -> Iterator[Client]:
    device = Device.open(device_name, capacity_bytes=64 << 20, page_bytes=PAGE, namespace=namespace)
    with device.client("engine") as opened:
        yield opened
        libcuda.pass_all()
    device.destroy()


@pytest.fixture
def arena(client: Client) -> WeightArena:
    return client.alloc_weights(WeightLayout.of(SPECS), "a model")


def write(libcuda: LibCuda, address: int, content: bytes, on_gpu: bool) -> None:
    """Writes like a kernel, or like the CPU on a host device."""
    target = address
    if on_gpu:
        view = libcuda.library.test_cuda_kernel_view
        view.restype = ctypes.c_void_p
        target = view(ctypes.c_uint64(address), ctypes.c_uint64(len(content)), 1)
        assert target, libcuda.refusal()
    ctypes.memmove(target, content, len(content))


def noise(seed: int, size_bytes: int) -> bytes:
    return np.random.default_rng(seed).bytes(size_bytes)


def fill_with_noise(libcuda: LibCuda, arena: WeightArena, device_name: str) -> dict[str, bytes]:
    arena.back()
    content = {name: noise(n, spec.size_bytes) for n, (name, spec) in enumerate(SPECS.items())}
    for name in ("half", "full"):
        write(libcuda, arena[name].address, content[name], device_name == "cuda:0")
    return content


def test_an_arena_is_stored_and_comes_back(
    libcuda: LibCuda, client: Client, arena: WeightArena, device_name: str, tmp_path: Path
) -> None:
    content = fill_with_noise(libcuda, arena, device_name)
    store = WeightStore.open(tmp_path / "store", max_bytes=64 << 20)

    def produce(builder: Any) -> None:
        for name in arena:
            builder.put(name, arena[name])

    with store.get(KEY, produce) as stored:
        assert stored.specs == SPECS
        assert {name: stored.path(name).read_bytes() for name in SPECS} == content
        second = client.alloc_weights(arena.layout, "again")
        second.load(stored)
        assert {name: second.read(name) for name in SPECS} == content
        assert {name: read_tensor(second[name]) for name in SPECS} == content
        second.free()
    arena.free()
    if device_name == "cuda:0":
        assert libcuda.calls("cuMemAllocHost") > 0


class OnStream:
    """Tensor whose owner has pending work on it on a stream, like torch's."""

    def __init__(self, view: Any, libcuda: LibCuda, work: CudaStream) -> None:
        self.view, self.libcuda, self.work = view, libcuda, work
        self.consumer = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.view.__dlpack_device__()
        return device

    def __dlpack__(self, *, stream: int, **_: object) -> object:
        cu, event = self.libcuda.library, ctypes.c_void_p()
        self.consumer = stream
        self.work.answer(lambda: cu.cuEventCreate(ctypes.byref(event), 2))
        self.work.answer(lambda: cu.cuEventRecord(event, ctypes.c_void_p(self.work.handle)))
        self.work.answer(lambda: cu.cuStreamWaitEvent(ctypes.c_void_p(stream), event, 0))
        self.work.answer(lambda: cu.cuEventDestroy_v2(event))
        return self.view.__dlpack__()


@pytest.mark.parametrize("device_name", ["cuda:0"], indirect=True)
def test_a_tensor_is_read_behind_its_owners_work(
    libcuda: LibCuda, arena: WeightArena, device_name: str
) -> None:
    """Waits for a copy of the content, which the test libcuda makes when it is waited for."""
    fill_with_noise(libcuda, arena, device_name)
    cu, late = libcuda.library, noise(9, SPECS["full"].size_bytes)
    work = CudaStream(libcuda)
    pinned = ctypes.c_void_p()
    work.answer(lambda: cu.cuMemAllocHost_v2(ctypes.byref(pinned), ctypes.c_size_t(len(late))))
    ctypes.memmove(pinned, late, len(late))
    target = ctypes.c_uint64(arena["full"].address)
    stream = ctypes.c_void_p(work.handle)
    work.answer(lambda: cu.cuMemcpyHtoDAsync_v2(target, pinned, ctypes.c_size_t(len(late)), stream))
    tensor = OnStream(arena["full"], libcuda, work)
    assert read_tensor(tensor) == late
    assert tensor.consumer not in (0, work.handle)
    work.answer(lambda: cu.cuMemFreeHost(pinned))
    work.close()


@pytest.mark.parametrize("device_name", ["cuda:0"], indirect=True)
def test_large_tensors_go_through_one_buffer(libcuda: LibCuda, client: Client) -> None:
    spec = TensorSpec("uint8", (2 * PIECE_BYTES + 5,))
    arena = client.alloc_weights(WeightLayout.of({"large": spec}), "large")
    arena.back()
    content = noise(3, spec.size_bytes)
    write(libcuda, arena["large"].address, content, on_gpu=True)
    libcuda.reset()
    assert arena.read("large") == content
    assert libcuda.calls("cuMemAllocHost") == 1
    assert libcuda.calls("cuMemcpyDtoHAsync") == 3
    arena.free()


@pytest.mark.parametrize("device_name", ["cuda:0"], indirect=True)
def test_without_pinned_memory_it_is_read_all_the_same(
    libcuda: LibCuda, arena: WeightArena, device_name: str
) -> None:
    content = fill_with_noise(libcuda, arena, device_name)
    libcuda.reset()
    # The reader's stream is not counted: the first counted call is that for pinned memory.
    libcuda.fail_at(1, error=LibCuda.OUT_OF_MEMORY)
    assert arena.read("full") == content["full"]
    assert libcuda.calls("cuMemAllocHost") == 1


@pytest.mark.parametrize("device_name", ["cuda:0"], indirect=True)
def test_a_copy_that_the_driver_refuses_is_an_error(
    libcuda: LibCuda, arena: WeightArena, device_name: str, tmp_path: Path
) -> None:
    fill_with_noise(libcuda, arena, device_name)
    store = WeightStore.open(tmp_path / "store", max_bytes=64 << 20)

    def produce(builder: Any) -> None:
        libcuda.fail_at(2)  # after the pinned memory
        builder.put("full", arena["full"])

    with pytest.raises(errors.SystemCallError, match="cuMemcpyDtoHAsync"):
        store.get(KEY, produce)
    libcuda.pass_all()
    assert store.used_bytes() == 0


def test_what_nobody_wrote_is_found(libcuda: LibCuda, arena: WeightArena, device_name: str) -> None:
    arena.fill()
    assert arena.backed_bytes == arena.size_bytes
    assert arena.unwritten() == ("half", "full")
    last = SPECS["full"].size_bytes - 1
    write(libcuda, arena["full"].address + last, b"\0", device_name == "cuda:0")
    assert arena.unwritten() == ("half",)
    assert arena.read("full") == b"\xff" * last + b"\0"
    arena.fill(0x7F)
    assert arena.unwritten() == ()
    assert arena.unwritten(0x7F) == ("half", "full")
    with pytest.raises(errors.InvalidArgumentError, match="from 0 to 255"):
        arena.fill(256)


class Elsewhere:
    """A tensor of another kind of device."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (8, 0)


def test_other_memory_is_refused_by_name(tmp_path: Path) -> None:
    store = WeightStore.open(tmp_path / "store", max_bytes=64 << 20)

    def produce(builder: Any) -> None:
        with pytest.raises(errors.InvalidArgumentError, match="tensor w is in Metal memory; copy"):
            builder.put("w", Elsewhere())
        builder.put("w", np.zeros(1))

    store.get(KEY, produce).close()


@pytest.mark.parametrize("device_name", ["cuda:0"], indirect=True)
def test_driver_calls_of_an_arena(libcuda: LibCuda, client: Client) -> None:
    """Backs pages in blocks: 24 MiB of 64 KiB pages took 384 creates and as many maps."""
    spec = TensorSpec("uint8", (24 << 20,))
    arena = client.alloc_weights(WeightLayout.of({"w": spec}), "large")
    libcuda.reset()
    arena.back()
    assert libcuda.count() == {"Create": 1, "Map": 1, "SetAccess": 1}
    libcuda.reset()
    arena.free()
    assert libcuda.count() == {"Release": 1, "Unmap": 1, "AddressFree": 1}
    assert client.usage().static_bytes == 0


def test_nothing_stays(libcuda: LibCuda, client: Client, arena: WeightArena) -> None:
    used_before = libcuda.used_bytes()
    for _ in range(2):
        arena.fill()
        arena.unwritten()
    arena.free()
    assert libcuda.used_bytes() <= used_before
    assert client.usage().static_bytes == 0
    assert os.environ["KVCACHED_LIBCUDA"]
