"""Facts of the test libcuda on the driver and its GPUs, with settings and without."""

from __future__ import annotations

import pytest

from .driver import run_with
from .libcuda import LibCuda

UUIDS = [f"GPU-7e57c0da-0000-4000-8000-00000000000{n + 1}" for n in range(4)]
VISIBLE = """
import uuid
result = cu.cuInit(0)
print(result)
if result == 0:
    cu.cuDeviceGetCount(ctypes.byref(count))
    for n in range(count.value):
        bits = ctypes.create_string_buffer(16)
        assert cu.cuDeviceGetUuid_v2(bits, n) == 0
        print("GPU-" + str(uuid.UUID(bytes=bits.raw)))
    assert cu.cuDeviceGet(ctypes.byref(count), count.value) == 101
"""


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, [0, 1, 2, 3]),
        ("0,1,2,3", [0, 1, 2, 3]),
        ("2", [2]),
        ("3, 1", [3, 1]),
        (UUIDS[2], [2]),
        (UUIDS[3] + ",0", [3, 0]),
        ("GPU-7e57c0da-0000-4000-8000-000000000004", [3]),
        ("GPU-7e57c0da", []),  # fits all of them
        ("1,9,2", [1]),  # the list ends at a device that does not exist
        ("1,-1,2", [1]),
        ("1,1", []),
        ("-1", []),
        ("none", []),
    ],
)
def test_visible_devices(libcuda: LibCuda, visible: str | None, gpus: list[int]) -> None:
    env = {"KVCACHED_TEST_CUDA_DEVICES": "4"}
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    done = run_with(libcuda, VISIBLE, **env)
    result, *uuids = done.stdout.split()
    assert uuids == [UUIDS[gpu] for gpu in gpus], done.stderr
    assert result == ("0" if gpus else "100")


def test_no_device_is_visible_by_an_empty_name(libcuda: LibCuda) -> None:
    assert run_with(libcuda, VISIBLE, CUDA_VISIBLE_DEVICES="").stdout == "100\n"


FACTS = """
def value(attribute):
    assert cu.cuDeviceGetAttribute(ctypes.byref(count), attribute, 0) == 0
    return count.value

print(cu.cuDriverGetVersion(ctypes.byref(count)), count.value)
cu.cuInit(0)
name, total = ctypes.create_string_buffer(64), ctypes.c_size_t()
assert cu.cuDeviceGetName(name, 64, 0) == cu.cuDeviceTotalMem_v2(ctypes.byref(total), 0) == 0
print(name.value.decode(), total.value)
print(*map(value, (16, 75, 76, 102, 103)))
print(cu.cuDeviceGetAttribute(ctypes.byref(count), 9999, 0), cu.cuDeviceGetName(name, 64, 9))
assert cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cu.cuCtxPushCurrent_v2(context) == 0
print(cu.cuMemAddressReserve(ctypes.byref(address), *u64(PAGE, 0, 0, 0)))
"""


def test_a_gpu_of_today(libcuda: LibCuda) -> None:
    done = run_with(libcuda, FACTS)
    assert done.stdout.splitlines() == [
        "0 13000",  # without cuInit
        "NVIDIA H200 67108864",
        "132 9 0 1 1",
        "1 101",
        "0",
    ], done.stderr


def test_a_gpu_of_a_tests_wish(libcuda: LibCuda) -> None:
    wish = {"NAME": "Tesla K80", "CAPABILITY": "3.7", "SMS": "13", "VMM": "0", "VERSION": "11040"}
    done = run_with(libcuda, FACTS, **{f"KVCACHED_TEST_CUDA_{k}": v for k, v in wish.items()})
    lines = done.stdout.splitlines()
    assert lines == ["0 11040", "Tesla K80 67108864", "13 3 7 0 0", "1 101", "801"], done.stderr


def test_a_driver_older_than_virtual_memory(libcuda: LibCuda) -> None:
    done = run_with(libcuda, FACTS, KVCACHED_TEST_CUDA_VERSION="10010")
    assert done.stdout.splitlines()[2:] == ["132 9 0 0 0", "1 101", "801"], done.stderr


def test_no_memory_is_exported_where_tests_say_so(libcuda: LibCuda) -> None:
    done = run_with(libcuda, FACTS, KVCACHED_TEST_CUDA_EXPORTS="0")
    assert done.stdout.splitlines()[2] == "132 9 0 1 0", done.stderr


def test_init_fails_as_tests_want_it(libcuda: LibCuda) -> None:
    code = "print(cu.cuInit(0), cu.cuDeviceGetCount(ctypes.byref(count)))"
    assert run_with(libcuda, code, KVCACHED_TEST_CUDA_INIT_ERROR="803").stdout == "803 3\n"
    assert run_with(libcuda, code, KVCACHED_TEST_CUDA_DEVICES="0").stdout == "100 3\n"


FORKED = """
{before}
if os.fork() == 0:
    print(cu.cuInit(0), cu.cuDeviceGetCount(ctypes.byref(count)), flush=True)
    print(cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), flush=True)
    print(cu.cuThreadExchangeStreamCaptureMode(ctypes.byref(count)), flush=True)
    os._exit(0)
os.wait()
print(cu.cuDeviceGetCount(ctypes.byref(count)))
"""


@pytest.mark.parametrize(
    ("before", "answers"),
    [
        ("cu.cuInit(0)", ["3", "3", "3", "3", "0"]),
        # A process that imports CUDA and does not initialise it may fork, as its count shows.
        ("assert cu.cuDeviceGetCount(ctypes.byref(count)) == 3", ["0", "0", "0", "0", "3"]),
        ("cu.cuDriverGetVersion(ctypes.byref(count))", ["0", "0", "0", "0", "3"]),
    ],
)
def test_initialised_before_a_fork(libcuda: LibCuda, before: str, answers: list[str]) -> None:
    done = run_with(libcuda, FORKED.format(before=before))
    assert done.stdout.split() == answers, done.stderr
