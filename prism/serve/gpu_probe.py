"""Checks each GPU of a configuration before anything is started.

A process of its own opens each GPU as an engine would. What would stop an engine is an error here,
in one line, and the size of a CUDA context is known afterwards.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

import kvcached
from kvcached import Device, DriverMemory, GpuFacts, KvcachedError
from kvcached.errors import (
    BackendUnavailableError,
    DeviceOccupiedError,
    UnsupportedDeviceError,
)
from prism.config.machines import is_gpu
from prism.config.schema import ClusterConfig, DeviceConfig
from prism.engines.gpu_share import own_pid
from prism.errors import ConfigError
from prism.process import child_environment, die_with_parent

_PATIENCE_S = 60.0
_OCCUPIED_WAIT_S = 10.0  # large processes that were killed a moment ago still hold memory


class GpuFound(msgspec.Struct, frozen=True):
    """The answer of the probing process. With an `error` all else is 0."""

    name: str = ""
    driver_version: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    context_bytes: int = 0  # of a fresh process; 0: the driver does not name its processes
    error: str = ""  # why this GPU cannot be used, and what to do
    occupied: str = ""  # the same, while other processes hold its memory


def probe(config: ClusterConfig, *, may_be_occupied: bool = False) -> dict[str, GpuFound]:
    """By device. Raises ConfigError for the first GPU that cannot be used as configured. Unless
    `may_be_occupied`, memory that others still hold after _OCCUPIED_WAIT_S is an error as well."""
    places = [(i, place) for i, place in enumerate(config.devices) if is_gpu(place.name)]
    asked = [(i, place, _ask(place, may_be_occupied)) for i, place in places]
    try:
        found = {place.name: _answer(i, place, process) for i, place, process in asked}
    finally:
        for _, _, process in asked:
            process.kill()
            process.wait()
    return found


def _ask(place: DeviceConfig, may_be_occupied: bool) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            sys.executable,
            *("-m", "prism.serve.gpu_probe", place.name),
            *(str(place.capacity_bytes), str(place.page_bytes)),
            *(["--may-be-occupied"] if may_be_occupied else []),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(),
    )


def _answer(index: int, place: DeviceConfig, process: subprocess.Popen[bytes]) -> GpuFound:
    key = f"devices[{index}]"
    try:
        said, complaints = process.communicate(timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{key}: {place.name} does not answer within {_PATIENCE_S:.0f} s; see nvidia-smi"
        ) from None
    try:
        found = msgspec.json.decode(said, type=GpuFound)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        last = complaints.decode(errors="replace").strip().splitlines()[-1:]
        raise ConfigError(
            f"{key}: asking for {place.name} ended with status {process.returncode}"
            f" ({''.join(last) or 'it says nothing'}); see nvidia-smi"
        ) from None
    if found.error:
        raise ConfigError(f"{key}: {' '.join(found.error.split())}")
    return found


# --- in the process of its own ---------------------------------------------------------------


def look(
    name: str, capacity_bytes: int, page_bytes: int, *, may_be_occupied: bool = False
) -> GpuFound:
    """Opens the GPU as an engine does, and measures. Raises KvcachedError."""
    facts = _facts(name)
    namespace = f"prism-check-{os.getpid()}-{secrets.token_hex(4)}"
    device = Device.open(
        name, capacity_bytes=capacity_bytes, page_bytes=page_bytes, namespace=namespace
    )
    try:
        before = device.driver_memory()
        occupied = _occupied(device, before, capacity_bytes, may_be_occupied)
        before = device.driver_memory()
        own = [] if occupied else _own_bytes(device, before)
    finally:
        device.destroy(force=True)
    return GpuFound(
        name=facts.name if facts else "",
        driver_version=facts.driver_version if facts else "",
        total_bytes=before.total_bytes if before else 0,
        free_bytes=before.free_bytes if before else 0,
        context_bytes=(own[0] or 0) if own else 0,
        occupied=occupied,
    )


def _occupied(
    device: Device, memory: DriverMemory | None, capacity_bytes: int, may_be_occupied: bool
) -> str:
    """Which processes hold memory that the capacity counts on; "" for none. Raises
    DeviceOccupiedError unless that is allowed, and for a capacity that the GPU does not have."""
    is_too_large = memory is not None and capacity_bytes > memory.total_bytes
    try:
        device.check_capacity(0.0 if may_be_occupied or is_too_large else _OCCUPIED_WAIT_S)
    except DeviceOccupiedError as error:
        if is_too_large or not may_be_occupied:
            raise
        return str(error)
    return ""


def _own_bytes(device: Device, before: DriverMemory | None) -> list[int | None]:
    with device.client("check"):
        after = device.driver_memory()
        pid = own_pid(before, after)
        return [p.used_bytes for p in (after.processes if after else ()) if p.pid == pid]


def _facts(name: str) -> GpuFacts | None:
    """None without NVML: then CUDA itself has to say what is wrong."""
    try:
        facts = kvcached.gpu_facts(name)
    except UnsupportedDeviceError:
        raise
    except BackendUnavailableError:
        return None
    if facts.mig:
        raise UnsupportedDeviceError(
            f"{name} ({facts.name}) is cut into MIG instances, and whole GPUs are shared here;"
            " disable MIG (nvidia-smi -mig 0) or use another GPU"
        )
    return facts


def main(arguments: Sequence[str]) -> None:
    """Prints a GpuFound as JSON; errors are a field of it."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="prism.serve.gpu_probe")
    parser.add_argument("device")
    parser.add_argument("capacity_bytes", type=int)
    parser.add_argument("page_bytes", type=int)
    parser.add_argument("--may-be-occupied", action="store_true")
    options = parser.parse_args(arguments)
    place = (options.device, options.capacity_bytes, options.page_bytes)
    try:
        found = look(*place, may_be_occupied=options.may_be_occupied)
    except KvcachedError as error:
        found = GpuFound(error=str(error))
    print(msgspec.json.encode(found).decode())


def warnings(found: Mapping[str, GpuFound]) -> list[str]:
    """What keeps it from starting now, and what will not be seen while it runs."""
    mute = [name for name, gpu in found.items() if not gpu.total_bytes]
    nameless = [
        name
        for name, gpu in found.items()
        if gpu.total_bytes and not (gpu.context_bytes or gpu.occupied)
    ]
    said = [
        f"warning: {' '.join(gpu.occupied.split())}; contexts are as planned, not measured"
        for gpu in found.values()
        if gpu.occupied
    ]
    if mute:
        said.append(
            f"warning: NVML does not answer for {', '.join(mute)}: what engines hold there beside"
            " KV and weights is planned and not watched; install libnvidia-ml.so.1 (in a container:"
            " the 'utility' capability)"
        )
    if nameless:
        said.append(
            f"warning: the driver names no process of ours on {', '.join(nameless)}: what engines"
            " hold there is watched less well; start the container with --pid=host"
        )
    return said


def contexts(found: Mapping[str, GpuFound]) -> dict[str, int]:
    """Measured contexts by device."""
    return {name: gpu.context_bytes for name, gpu in found.items() if gpu.context_bytes}


if __name__ == "__main__":
    main(sys.argv[1:])
