"""GPU types, including those in the user's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prism.config.reader import convert, read_mapping
from prism.errors import ConfigError
from prism_sim.costs.gpus import GPUS, GpuSpec, unknown_type
from prism_sim.scenario.config import GpuFileYaml, GpuTypeYaml


def gpu_type(name: str, files: Sequence[Path]) -> GpuSpec:
    """Returns a GPU type of Prism or of the files. All files are checked. Raises ConfigError that
    names file and key, or names a similar type or all."""
    known = dict(GPUS)
    for file in files:
        for number, given in enumerate(_types(file)):
            if given.name in known:
                raise ConfigError(
                    f"{file}: types[{number}].name: {given.name!r} already exists; rename it"
                )
            known[given.name] = _spec(given)
    if name not in known:
        raise ConfigError(f"gpus.type: {unknown_type(name, known)}")
    return known[name]


def _types(file: Path) -> list[GpuTypeYaml]:
    try:
        data = read_mapping(file, "types:", "correct gpu_files")
        return convert(data, GpuFileYaml).types
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _spec(given: GpuTypeYaml) -> GpuSpec:
    return GpuSpec(
        given.name,
        int(given.memory),
        float(given.bandwidth),
        given.tflops * 1e12,
        float(given.pcie),
        None if given.nvlink is None else float(given.nvlink),
        given.compute_efficiency,
        given.bandwidth_efficiency,
        float(given.allreduce),
    )
