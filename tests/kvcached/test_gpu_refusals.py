"""GPUs that cannot be used, and memory of other processes: errors that say what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvcached import Device, errors, gpu_facts

from .compiling import build_libnvml, restart_libnvml
from .conftest import PAGE
from .libcuda import LibCuda

MIB = 1 << 20
GPU_BYTES = 1 << 30  # of each device of the test libcuda

OPEN = """
import sys
import kvcached
device = kvcached.Device.open(
    sys.argv[2], capacity_bytes=1 << 20, page_bytes=1 << 16, namespace=sys.argv[1])
try:
    device.client("a").close()
    print("opened")
except kvcached.KvcachedError as error:
    print(type(error).__name__, error)
device.destroy(force=True)
"""


@pytest.fixture
def device_name() -> str:
    return "cuda:0"


@pytest.fixture
def libnvml(libcuda: LibCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHED_LIBNVML", str(build_libnvml()))
    restart_libnvml()


def said(namespace: str, device: str = "cuda:0", **env: str) -> str:
    """Returns the output of a fresh process that opens a client on the device."""
    done = subprocess.run(
        [sys.executable, "-c", OPEN, namespace, device],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_driver_that_is_too_old(libcuda: LibCuda, namespace: str) -> None:
    told = said(namespace, KVCACHED_TEST_CUDA_VERSION="10010")
    assert told.startswith("DriverTooOldError NVIDIA's driver is too old: it is of CUDA 10.1")
    assert "install the driver of CUDA 11.4 or later" in told


def test_a_libcuda_of_another_version_than_the_kernels_driver(
    libcuda: LibCuda, namespace: str
) -> None:
    told = said(namespace, KVCACHED_TEST_CUDA_INIT_ERROR="803")
    assert told.startswith("NoDriverError libcuda and the kernel's NVIDIA driver are of different")
    assert "reboot or reload the driver's modules" in told


def test_a_gpu_without_virtual_memory(libcuda: LibCuda, namespace: str) -> None:
    told = said(namespace, KVCACHED_TEST_CUDA_VMM="0")
    assert told.startswith(
        "UnsupportedDeviceError device 'cuda:0', NVIDIA H200, does not support virtual"
    )
    assert "use another GPU or a host device such as 'host:0'" in told


def test_a_part_of_a_gpu(libcuda: LibCuda, namespace: str) -> None:
    told = said(namespace, KVCACHED_TEST_CUDA_NAME="NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert told.startswith("UnsupportedDeviceError device 'cuda:0', NVIDIA H100 80GB HBM3 MIG")
    assert "disable MIG (nvidia-smi -mig 0)" in told


def test_a_gpu_that_is_hidden(libcuda: LibCuda, namespace: str) -> None:
    assert said(namespace, CUDA_VISIBLE_DEVICES="1") == "opened"
    told = said(namespace, "cuda:1", CUDA_VISIBLE_DEVICES="1")
    assert told.startswith("HiddenDeviceError device 'cuda:1' does not exist; the driver shows")
    assert "as CUDA_VISIBLE_DEVICES is '1'; name the GPU there or use a lower number" in told
    told = said(namespace, CUDA_VISIBLE_DEVICES="")
    assert told.startswith("HiddenDeviceError the driver shows no GPU, as CUDA_VISIBLE_DEVICES is")
    assert issubclass(errors.HiddenDeviceError, errors.UnknownDeviceError)


FORK = """
import ctypes, os, sys
import kvcached
device = kvcached.Device.open(
    "cuda:0", capacity_bytes=1 << 20, page_bytes=1 << 16, namespace=sys.argv[1])
assert ctypes.CDLL(os.environ["KVCACHED_LIBCUDA"]).cuInit(0) == 0
child = os.fork()
if child == 0:
    try:
        device.client("a")
    except kvcached.KvcachedError as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
device.destroy()
"""


def test_forked_after_another_library_used_cuda(libcuda: LibCuda, namespace: str) -> None:
    """Reports the fork, not a missing driver, after calls of torch, say, and none of kvcached."""
    done = subprocess.run(
        [sys.executable, "-c", FORK, namespace], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("ForkedClientError CUDA was initialised before this process was")
    assert "start a fresh process (spawn)" in done.stdout


HOLD = """
import sys
import kvcached
device = kvcached.Device.open(
    "cuda:0", capacity_bytes=1 << 29, page_bytes=1 << 16, namespace=sys.argv[1] + "x")
client = device.client("stranger")
tensor = client.alloc_virtual_tensor(256 << 20)
tensor.map(0, 256 << 20)
print("holds", flush=True)
sys.stdin.read()
client.close()
device.destroy()
"""


@contextmanager
def stranger(namespace: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a process that holds 256 MiB of the GPU, on a separate ledger."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, namespace],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "holds\n"
    try:
        yield process
    finally:
        process.communicate()


def test_memory_that_others_hold(libnvml: None, namespace: str) -> None:
    device = Device.open("cuda:0", capacity_bytes=GPU_BYTES, page_bytes=PAGE, namespace=namespace)
    device.check_capacity()
    with stranger(namespace) as other:
        with pytest.raises(errors.DeviceOccupiedError) as refused:
            device.check_capacity()
        told = str(refused.value)
        assert "of which 256 MiB are used outside of the ledger" in told
        assert f"pid {other.pid}" in told
        assert "holds 256 MiB" in told
        assert "open the device with at most 768 MiB" in told
        drift = device.compare_with_driver()
        assert drift is not None
        assert (drift.ledger_bytes, drift.foreign_bytes) == (0, 256 * MIB)
        assert drift.drift_bytes == 256 * MIB
        assert [process.pid for process in drift.foreign] == [other.pid]
    device.check_capacity(wait_s=60)  # until it is freed
    device.destroy()


def test_clients_are_no_strangers(libnvml: None, namespace: str) -> None:
    device = Device.open("cuda:0", capacity_bytes=GPU_BYTES, page_bytes=PAGE, namespace=namespace)
    with device.client("own") as client:
        tensor = client.alloc_virtual_tensor(64 * PAGE)
        tensor.map(0, 64 * PAGE)
        device.check_capacity()
        drift = device.compare_with_driver()
        assert drift is not None
        assert drift.ledger_bytes == drift.driver_bytes == 64 * PAGE
        assert (drift.drift_bytes, drift.foreign) == (0, ())
        client.free_virtual_tensor(tensor)
    device.destroy()


ASK = """
import ctypes, json, os, sys
import kvcached
device = kvcached.Device.open(
    "cuda:0", capacity_bytes=1 << 20, page_bytes=1 << 16, namespace=sys.argv[1])
memory = device.driver_memory()
count = ctypes.c_int()
unused = ctypes.CDLL(os.environ["KVCACHED_LIBCUDA"]).cuDeviceGetCount(ctypes.byref(count)) == 3
print(json.dumps([memory and memory.total_bytes, memory and memory.free_bytes, unused]))
device.destroy()
"""


def asked(namespace: str, **env: str) -> list[object]:
    done = subprocess.run(
        [sys.executable, "-c", ASK, namespace],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    answer: list[object] = json.loads(done.stdout)
    return answer


def test_asking_the_driver_uses_no_cuda(libnvml: None, namespace: str) -> None:
    assert asked(namespace) == [GPU_BYTES, GPU_BYTES, True]
    assert asked(namespace, CUDA_VISIBLE_DEVICES="1") == [GPU_BYTES, GPU_BYTES, True]
    assert asked(namespace, KVCACHED_LIBNVML="libnot-there.so") == [None, None, True]


def test_what_a_gpu_is(libnvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = gpu_facts("cuda:1")
    assert (facts.name, facts.mig) == ("NVIDIA H200", False)
    assert facts.total_bytes >= facts.free_bytes > 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", facts.uuid)
    assert gpu_facts("cuda:0") == facts
    with pytest.raises(errors.HiddenDeviceError, match="CUDA_VISIBLE_DEVICES"):
        gpu_facts("cuda:1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1234")
    with pytest.raises(errors.UnsupportedDeviceError, match="disable MIG"):
        gpu_facts("cuda:0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(errors.UnknownDeviceError, match="there are 2 GPUs"):
        gpu_facts("cuda:2")
    monkeypatch.setenv("KVCACHED_LIBNVML", "libnot-there.so")
    with pytest.raises(errors.NoDriverError, match="install the driver"):
        gpu_facts("cuda:0")


def test_what_a_gpu_is_takes_no_libcuda(libnvml: None) -> None:
    code = "import kvcached; print(kvcached.gpu_facts('cuda:0').name)"
    env = {**os.environ, "KVCACHED_LIBCUDA": "libnot-there.so"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "NVIDIA H200\n"


@pytest.mark.parametrize("name", ["host:0", "cuda:", "cuda:x", "cuda:12345", "cuda", "gpu:0"])
def test_only_gpus_have_facts(libnvml: None, name: str) -> None:
    with pytest.raises(errors.UnknownDeviceError, match="name one such as 'cuda:0'"):
        gpu_facts(name)


@pytest.mark.parametrize("device_name", ["host:0"])
def test_a_host_device_is_asked_the_os(device: Device, device_name: str) -> None:
    with device.client("own") as client:
        tensor = client.alloc_virtual_tensor(8 * PAGE)
        tensor.map(0, 8 * PAGE)
        memory = device.driver_memory()
        assert memory is not None
        assert (memory.source, memory.used_bytes) == ("host", 0)  # nothing was touched
        drift = device.compare_with_driver()
        assert drift is not None
        assert (drift.ledger_bytes, drift.driver_bytes) == (8 * PAGE, 0)
        device.check_capacity()


KILLED = """
import os, sys
import kvcached
device = kvcached.Device.open(
    "cuda:0", capacity_bytes=1 << 30, page_bytes=1 << 20, namespace=sys.argv[1])
tensor = device.client("large").alloc_virtual_tensor(1 << 30)
tensor.map(0, 1 << 30)
os.kill(os.getpid(), 9)
"""

AFTER = """
import sys
import kvcached
device = kvcached.Device.open("cuda:0", namespace=sys.argv[1])
client = device.client("next")
if sys.argv[2]:
    client.set_create_wait(float(sys.argv[2]))
tensor = client.alloc_virtual_tensor(1 << 30)
try:
    tensor.map(0, 1 << 30)
    print("mapped")
except kvcached.NoRoomError as error:
    print(error)
"""


def test_the_memory_of_a_killed_process_is_waited_for(libcuda: LibCuda, namespace: str) -> None:
    """Covers a driver that takes 2 seconds. The default wait was half a second."""
    env = {**os.environ, "KVCACHED_TEST_CUDA_TEARDOWN_MS": "2000"}

    def after(wait_s: str) -> str:
        subprocess.run([sys.executable, "-c", KILLED, namespace], env=env, check=False)
        next_one = [sys.executable, "-c", AFTER, namespace, wait_s]
        return subprocess.run(next_one, env=env, capture_output=True, text=True, check=True).stdout

    try:
        assert "if a killed process is still being cleaned up" in after("0.1")
        assert after("") == "mapped\n"
    finally:
        Device.unlink(namespace, "cuda:0", force=True)
