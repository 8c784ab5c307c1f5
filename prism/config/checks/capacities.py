"""Capacities of devices that the YAML does not give as a size."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec
import psutil

import kvcached
from kvcached import GpuFacts, KvcachedError
from prism.config.schema.machines import DeviceYaml, is_gpu
from prism.config.schema.units import Capacity
from prism.errors import ConfigError

FREE_SHARE = 0.9
"""Part of a GPU's free memory that is its capacity by default. The rest is for what engines
allocate outside of the ledger, and for other processes."""
FREE = "free"
"""Origin of a default capacity."""


def with_sizes(devices: Sequence[DeviceYaml], known: Mapping[str, int]) -> list[DeviceYaml]:
    """Returns this machine's devices with sizes as capacities. Raises ConfigError.

    Args:
        known: Capacities of a running cluster, which keep their sizes.
    """
    return [
        msgspec.structs.replace(device, capacity=_sized(device, f"devices[{index}]", known))
        for index, device in enumerate(devices)
    ]


def _sized(device: DeviceYaml, key: str, known: Mapping[str, int]) -> Capacity | None:
    given = device.capacity
    is_size = given is not None and given.share is None
    if is_size or not device.name.startswith(("cuda:", "host:")):  # other names are refused later
        return given
    origin = FREE if given is None else given.text
    if device.name in known:
        return Capacity(known[device.name], origin)
    if is_gpu(device.name):
        return Capacity(_of_gpu(device.name, given, key), origin)
    if given is None or given.share is None:
        raise ConfigError(
            f"{key}.capacity: is required for a host device; give a size such as 8GiB, or a part of"
            " the memory such as 50%"
        )
    return Capacity(int(given.share * psutil.virtual_memory().total), origin)


def facts_of(device: str) -> GpuFacts:
    """Returns the facts of a GPU, which has the number of nvidia-smi here and in every child.
    Raises KvcachedError."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return kvcached.gpu_facts(device)


def _of_gpu(name: str, given: Capacity | None, key: str) -> int:
    remedy = "give a size such as 70GiB"
    try:
        facts = facts_of(name)
    except KvcachedError as error:
        raise ConfigError(
            f"{key}.capacity: the memory of {name} cannot be read ({error}); {remedy}"
        ) from error
    if not facts.total_bytes:
        raise ConfigError(f"{key}.capacity: the driver does not report {name}'s memory; {remedy}")
    if given is not None and given.share is not None:
        return int(given.share * facts.total_bytes)
    return int(FREE_SHARE * facts.free_bytes)
