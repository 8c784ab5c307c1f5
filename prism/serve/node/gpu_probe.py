"""Checks each GPU of a configuration before anything is started.

A separate process opens each GPU as an engine would. What would stop an engine is reported as an
error of one line. The process also measures the size of a CUDA context.
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
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig
from prism.config.schema.machines import is_gpu
from prism.errors import ConfigError
from prism.process import child_environment, die_with_parent

_TIMEOUT_S = 60.0
_OCCUPIED_WAIT_S = 10.0  # a large process that was just killed still holds memory


class GpuFound(msgspec.Struct, frozen=True):
    """Result of the probing process. With an `error`, all other fields are empty."""

    name: str = ""
    driver_version: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    context_bytes: int = 0  # of a new process; 0: the driver does not name processes
    error: str = ""  # why this GPU cannot be used, and what to do
    occupied: str = ""  # set if other processes hold its memory, and what to do


def probe(config: ClusterConfig, *, may_be_occupied: bool = False) -> dict[str, GpuFound]:
    """Returns the result for each device. Raises ConfigError for the first GPU that cannot be used
    as configured. Unless `may_be_occupied`, memory that other processes still hold after
    _OCCUPIED_WAIT_S is an error as well."""
    places = [(i, place) for i, place in enumerate(config.devices) if is_gpu(place.name)]
    probes = [(i, place, _start_probe(place, may_be_occupied)) for i, place in places]
    try:
        found = {place.name: _read_result(i, place, process) for i, place, process in probes}
    finally:
        for _, _, process in probes:
            process.kill()
            process.wait()
    return found


def _start_probe(place: DeviceConfig, may_be_occupied: bool) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            sys.executable,
            *("-m", "prism.serve.node.gpu_probe", place.name),
            *(str(place.capacity_bytes), str(place.page_bytes)),
            *(["--may-be-occupied"] if may_be_occupied else []),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(),
    )


def _read_result(index: int, place: DeviceConfig, process: subprocess.Popen[bytes]) -> GpuFound:
    key = f"devices[{index}]"
    try:
        output, errors = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{key}: {place.name} did not answer in {_TIMEOUT_S:.0f} s; see nvidia-smi"
        ) from None
    try:
        found = msgspec.json.decode(output, type=GpuFound)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise ConfigError(
            f"{key}: the check of {place.name} ended with exit code {process.returncode}"
            f" ({''.join(last) or 'no output'}); see nvidia-smi"
        ) from None
    if found.error:
        raise ConfigError(f"{key}: {' '.join(found.error.split())}")
    return found


# --- in the separate process -----------------------------------------------------------------


def measure(
    name: str, capacity_bytes: int, page_bytes: int, *, may_be_occupied: bool = False
) -> GpuFound:
    """Opens the GPU as an engine does, and measures it. Raises KvcachedError."""
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
    """Returns the processes that hold memory of the capacity, or an empty string. Raises
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
    from prism.engines.gpu_share import own_pid  # imports the engines' interface

    with device.client("check"):
        after = device.driver_memory()
        pid = own_pid(before, after)
        return [p.used_bytes for p in (after.processes if after else ()) if p.pid == pid]


def _facts(name: str) -> GpuFacts | None:
    """Returns None without NVML. CUDA then reports what is wrong."""
    try:
        facts = kvcached.gpu_facts(name)
    except UnsupportedDeviceError:
        raise
    except BackendUnavailableError:
        return None
    if facts.mig:
        raise UnsupportedDeviceError(
            f"{name} ({facts.name}) is split into MIG instances, but a whole GPU is required;"
            " disable MIG (nvidia-smi -mig 0) or use another GPU"
        )
    return facts


def main(arguments: Sequence[str]) -> None:
    """Prints a GpuFound as JSON. Errors are a field of it."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="prism.serve.node.gpu_probe")
    parser.add_argument("device")
    parser.add_argument("capacity_bytes", type=int)
    parser.add_argument("page_bytes", type=int)
    parser.add_argument("--may-be-occupied", action="store_true")
    options = parser.parse_args(arguments)
    place = (options.device, options.capacity_bytes, options.page_bytes)
    try:
        found = measure(*place, may_be_occupied=options.may_be_occupied)
    except KvcachedError as error:
        found = GpuFound(error=str(error))
    print(msgspec.json.encode(found).decode())


def warnings(found: Mapping[str, GpuFound]) -> list[str]:
    """Returns warnings about occupied memory, and about memory that cannot be monitored."""
    unreported = [name for name, gpu in found.items() if not gpu.total_bytes]
    nameless = [
        name
        for name, gpu in found.items()
        if gpu.total_bytes and not (gpu.context_bytes or gpu.occupied)
    ]
    output = [
        f"warning: {' '.join(gpu.occupied.split())}; contexts are estimated, not measured"
        for gpu in found.values()
        if gpu.occupied
    ]
    if unreported:
        output.append(
            f"warning: NVML does not answer for {', '.join(unreported)}: engines' memory other than"
            " KV and weights is estimated and not monitored; install libnvidia-ml.so.1 (in a"
            " container: the 'utility' capability)"
        )
    if nameless:
        output.append(
            f"warning: the driver does not report processes on {', '.join(nameless)}: memory of"
            " engines is monitored less precisely; start the container with --pid=host"
        )
    return output


def contexts(found: Mapping[str, GpuFound]) -> dict[str, int]:
    """Returns the measured contexts by device."""
    return {name: gpu.context_bytes for name, gpu in found.items() if gpu.context_bytes}


if __name__ == "__main__":
    main(sys.argv[1:])
