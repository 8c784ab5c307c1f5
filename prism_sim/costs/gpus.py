"""GPU types with the vendors' peak rates, and with the links of the papers' testbeds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prism.config.reader import suggestion
from prism.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU type."""

    name: str
    memory_bytes: int
    bandwidth_bytes_s: float
    # Dense 16-bit peak.
    flops_s: float
    # Per GPU, in one direction.
    pcie_bytes_s: float
    # Per GPU, in one direction. None: GPUs communicate over PCIe.
    nvlink_bytes_s: float | None = None
    # The part of the compute peak that large kernels reach.
    compute_efficiency: float = 0.65
    # The part of the memory bandwidth that large kernels reach.
    bandwidth_efficiency: float = 0.8
    # Latency of one small all-reduce.
    allreduce_s: float = 12e-6

    @property
    def peer_bytes_s(self) -> float:
        return self.nvlink_bytes_s or self.pcie_bytes_s


GPUS: dict[str, GpuSpec] = {
    gpu.name: gpu
    for gpu in (
        GpuSpec("a100-40", 40 * GIB, 1.555e12, 312e12, 32e9, 300e9),
        GpuSpec("a100-80", 80 * GIB, 2.039e12, 312e12, 32e9, 300e9),
        GpuSpec("h100", 80 * GIB, 3.35e12, 989e12, 64e9, 450e9),
        GpuSpec("h200", 141 * 10**9, 4.8e12, 989e12, 64e9, 450e9),
        GpuSpec("l40s", 48 * GIB, 0.864e12, 362e12, 32e9),
        # A CPU used as a GPU, with the rates of two desktop cores. A calibration is more accurate.
        GpuSpec("host", 8 * GIB, 20e9, 0.1e12, 10e9, None, 0.5, 0.7, 1e-4),
    )
}


def gpu_spec(name: str) -> GpuSpec:
    """Returns a GPU type. Raises ConfigError as `unknown_type`."""
    if name not in GPUS:
        raise unknown_type(name, GPUS)
    return GPUS[name]


def unknown_type(name: str, known: Iterable[str]) -> ConfigError:
    """Returns an error that names a similar GPU type, or all."""
    hint = suggestion(name, known) or f"known types are {', '.join(known)}"
    return ConfigError(f"gpu {name!r}: {hint}")
