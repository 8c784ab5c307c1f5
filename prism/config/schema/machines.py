"""Machines and devices of the YAML, and the base of all its structs."""

from __future__ import annotations

import msgspec

from prism.config.schema.units import Bytes, Capacity


def is_gpu(device: str) -> bool:
    """Returns True if a device is a GPU."""
    return device.startswith("cuda:")


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the YAML's structs: an unknown key is an error that names it."""


class DeviceYaml(Strict, frozen=True):
    """One device: a GPU, or a fixed amount of the machine's memory."""

    # "cuda:N" is the GPU that nvidia-smi numbers N. "host:N" is memory of the machine.
    name: str
    # The memory that Prism may use on this device, for weights, KV and engines: a size such as
    # "70GiB", or a part of the device's memory such as "90%". Default: 90% of what is free on a GPU
    # at the start; a host device needs a value. With nodes or ray it must be a size.
    capacity: Capacity | None = None
    # The unit in which KV memory is mapped: a power of two of at least 4KiB.
    page: Bytes = Bytes("2MiB")
    # The number of engine processes on this device: 1 to 64. Each serves one model at a time.
    engines: int = 2
    # The percentage of the GPU's SMs that each engine may use: one number per engine, 1 to 100. It
    # needs engine.mps. Default: every engine may use all of them.
    sm_percent: list[int] | None = None


class NodeYaml(Strict, frozen=True):
    """One machine of several. All read the same file, and each runs a part of the cluster:
    `prism-serve --node NAME`."""

    # Letters, digits and dashes. Its devices are called cuda:0@NAME, and so on.
    name: str
    # The IP address by which the other machines reach this one.
    address: str
    # The first of its ports for connections within the cluster: one for the scheduler, one for each
    # device, 64 for frontends and one for weights.
    port: int = 7300
    # The number of processes that serve the API there: 0 to 16.
    frontends: int = 1
    # The bytes per second between this machine and another one: of its network, or of encryption if
    # that is slower. Weights are sent below this rate. With scheduler.migrate_running "move",
    # requests move to another machine with their KV if prefill would compute it more slowly.
    network_rate: Bytes = Bytes("1.25GB")
    # The bytes per second at which it reads models' files from its disk. Weights are fetched from
    # another machine's store instead if `network_rate` of both is higher.
    disk_rate: Bytes = Bytes("2GB")
    # Its devices.
    devices: list[DeviceYaml] = []
