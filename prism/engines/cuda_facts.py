"""Properties of the CUDA devices, read without initialising CUDA in this process.

A process that has initialised CUDA cannot be forked into one that uses it. The fork server
therefore asks a short-lived process: this file, run by its path, imports only the standard library
and prints one JSON list. Its device numbers are CUDA's, after `CUDA_VISIBLE_DEVICES`.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys

LIBRARY_VARIABLE = "KVCACHED_LIBCUDA"
DEFAULT_LIBRARY = "libcuda.so.1"
WAIT_S = 60.0  # a driver without its persistence daemon takes seconds to wake a GPU
_NOT_INITIALIZED = 3

# CUdevice_attribute numbers, by the names of torch's device properties.
_ATTRIBUTES = {
    "major": 75,
    "minor": 76,
    "multi_processor_count": 16,
    "warp_size": 10,
    "max_threads_per_block": 1,
    "max_threads_per_multi_processor": 39,
    "regs_per_multiprocessor": 82,
    "shared_memory_per_block": 8,
    "shared_memory_per_block_optin": 97,
    "shared_memory_per_multiprocessor": 81,
    "L2_cache_size": 38,
    "clock_rate": 13,
    "memory_clock_rate": 36,
    "memory_bus_width": 37,
    "is_integrated": 18,
    "pci_bus_id": 33,
    "pci_device_id": 34,
    "pci_domain_id": 50,
}

Facts = dict[str, int | str]


class CudaFactsError(Exception):
    """The driver could not be queried."""


def is_initialized() -> bool:
    """Returns whether this process has initialised CUDA, without initialising it."""
    name = os.environ.get(LIBRARY_VARIABLE, DEFAULT_LIBRARY)
    try:
        driver = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return False  # not even loaded
    count = ctypes.c_int()
    result: int = driver.cuDeviceGetCount(ctypes.byref(count))
    return result != _NOT_INITIALIZED


def ask() -> list[Facts]:
    """Returns the properties of every visible device, from a separate process. Raises
    CudaFactsError."""
    command = [sys.executable, "-I", __file__]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=WAIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CudaFactsError(f"cannot run the query of the CUDA driver: {error}") from error
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise CudaFactsError(last[0] if last else f"the query exited with {done.returncode}")
    facts: list[Facts] = json.loads(done.stdout)
    return facts


def _read() -> list[Facts]:
    name = os.environ.get(LIBRARY_VARIABLE, DEFAULT_LIBRARY)
    driver = ctypes.CDLL(name)
    _check(driver.cuInit(0), "cuInit")
    count = ctypes.c_int()
    _check(driver.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    return [_facts_of(driver, index) for index in range(count.value)]


def _facts_of(driver: ctypes.CDLL, index: int) -> Facts:
    device, total = ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    _check(driver.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
    _check(driver.cuDeviceGetName(name, len(name), device), "cuDeviceGetName")
    _check(driver.cuDeviceTotalMem_v2(ctypes.byref(total), device), "cuDeviceTotalMem")
    facts: Facts = {"name": name.value.decode(), "total_memory": total.value}
    for attribute, number in _ATTRIBUTES.items():
        value = ctypes.c_int()
        if driver.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0:
            facts[attribute] = value.value
    return facts


def _check(result: int, what: str) -> None:
    if result != 0:
        raise SystemExit(f"{what} failed with CUDA error {result}")


if __name__ == "__main__":
    try:
        answer = _read()
    except OSError as missing:
        raise SystemExit(str(missing)) from missing
    print(json.dumps(answer))
