"""Lookup of a model's shape, and of the cost table for a (GPU, model, TP).

The table is the user's, the shipped grid's, or the roofline's.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from prism.errors import ConfigError
from prism_sim.costs.checkpoint import name_of, read_shape
from prism_sim.costs.gpus import GpuSpec, gpu_spec
from prism_sim.costs.grid import read_grid, shipped_grid
from prism_sim.costs.model import CostModel
from prism_sim.costs.roofline import roofline
from prism_sim.costs.shapes import CONFIGS, ModelShape, known_shape, short_name
from prism_sim.costs.table import StepTable, TableCost, with_host

HOST_S = 1e-3
"""Host time per step, which minimises the median TPOT error over docs/cost-validation.md."""
Key = tuple[str, ModelShape, int]


def cost_model(
    gpu: str | GpuSpec,
    model: str,
    tp: int = 1,
    host_s: float = HOST_S,
    files: tuple[Path, ...] = (),
) -> CostModel:
    """Returns the best known costs for a (GPU, model, TP). Raises ConfigError.

    The same arguments give the same object while the named files do not change.

    Args:
        gpu: Name of a known type, or a type that the user defined.
        model: Name of a public model, or path of a config.json.
        tp: Tensor-parallel degree.
        host_s: Host time per step that does not overlap with the GPU. Ignored for tables in
            `files`, which include it.
        files: Tables from `prism-sim calibrate engine`, for any GPU and model (`name_of` a path).
            Later files have precedence.
    """
    read = (*files, Path(model)) if _is_path(model) else files
    return _cost_model(gpu, model, tp, host_s, files, tuple(_changed_ns(path) for path in read))


def _changed_ns(path: Path) -> int:
    """Returns the modification time of a file, or 0 if it does not exist, which reading it
    reports."""
    file = path / "config.json" if path.is_dir() else path
    return file.stat().st_mtime_ns if file.exists() else 0


@cache
def _cost_model(
    gpu: str | GpuSpec,
    model: str,
    tp: int,
    host_s: float,
    files: tuple[Path, ...],
    _changed: tuple[int, ...],
) -> CostModel:
    type_ = gpu if isinstance(gpu, str) else gpu.name
    name = short_name(name_of(Path(model)) if _is_path(model) else model)
    for path in reversed(files):
        for table in read_grid(path).tables:
            if (table.gpu, short_name(table.model), table.tp) == (type_, name, tp):
                return TableCost(table)
    return TableCost(with_host(cost_table(gpu, model, tp), host_s))


def cost_table(gpu: str | GpuSpec, model: str, tp: int = 1) -> StepTable:
    """Returns the shipped grid's table, or else the roofline's, without host time. Raises
    ConfigError."""
    spec = gpu_spec(gpu) if isinstance(gpu, str) else gpu
    shape = model_shape(model)
    measured = _shipped_tables().get((spec.name, shape.geometry, tp))
    return measured or roofline(spec, shape, tp)


@cache
def _shipped_tables() -> dict[Key, StepTable]:
    return {
        (table.gpu, model_shape(table.model).geometry, table.tp): table
        for table in shipped_grid().tables
    }


def model_shape(name: str) -> ModelShape:
    """Returns the shape of a known model, or else of the config.json at the path `name`. Raises
    ConfigError that lists the known models."""
    known = known_shape(name)
    if known is not None:
        return known
    if _is_path(name):
        return read_shape(Path(name))
    raise ConfigError(f"model {name!r}: known models are {', '.join(CONFIGS)}")


def _is_path(name: str) -> bool:
    return name.endswith(".json") or (Path(name) / "config.json").is_file()
