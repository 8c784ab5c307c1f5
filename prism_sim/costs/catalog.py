"""A model's shape by its name, and the table that serves a (GPU, model, TP): a user's, the shipped
grid's, or the roofline."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from prism.errors import ConfigError
from prism_sim.costs.checkpoint import name_of, read_shape
from prism_sim.costs.gpus import GpuSpec, gpu_spec
from prism_sim.costs.grid import read_grid, shipped_grid
from prism_sim.costs.model import CostModel
from prism_sim.costs.roofline import roofline
from prism_sim.costs.shapes import MODELS, ModelShape, known_shape, short_name
from prism_sim.costs.table import StepTable, TableCost, with_host

HOST_S = 1e-3
"""Per step: minimises the median TPOT error over the rows of docs/cost-validation.md."""
Key = tuple[str, ModelShape, int]


def cost_model(
    gpu: str | GpuSpec,
    model: str,
    tp: int = 1,
    host_s: float = HOST_S,
    files: tuple[Path, ...] = (),
) -> CostModel:
    """The best costs known for this (GPU, model, TP). The same arguments give the same object, as
    long as the files that they name stay as they are.

    gpu: a known type's name, or a type of the user's own.
    files: tables of the user's own (`prism-sim calibrate engine` writes them), the last of which
    goes first; they name any GPU and model (`name_of` a path) and hold their host time.
    host_s: time per step not hidden behind the GPU, for all other tables. Raises ConfigError.
    """
    read = (*files, Path(model)) if _is_path(model) else files
    return _cost_model(gpu, model, tp, host_s, files, tuple(_changed_ns(path) for path in read))


def _changed_ns(path: Path) -> int:
    """0 of a file that is not there: whoever reads it says so."""
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
    """The shipped grid's table, or the roofline where it has none; without host time. Raises
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
    """Of a model that `known_shape` knows, else of the path `name`, by its config.json. Raises
    ConfigError that lists the known models."""
    known = known_shape(name)
    if known is not None:
        return known
    if _is_path(name):
        return read_shape(Path(name))
    raise ConfigError(f"model {name!r}: known models are {', '.join(MODELS)}")


def _is_path(name: str) -> bool:
    return name.endswith(".json") or (Path(name) / "config.json").is_file()
