"""Lookup of a model's shape, and of the cost table for a (GPU, model, TP).

The table is the user's, the shipped grid's, or the roofline's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from prism.config.checks.kv_cache import AUTO, KV_CACHE_DTYPES
from prism.config.reader import suggestion
from prism.errors import ConfigError
from prism.models.files import KV_DTYPE_BYTES
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
    *,
    kv_dtype: str = AUTO,
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
        kv_dtype: Type of the KV cache, as `kv_cache_dtype` names it.
    """
    read = (*files, Path(model)) if _is_path(model) else files
    changed = tuple(_changed_ns(path) for path in read)
    return _cost_model(gpu, model, tp, host_s, files, changed, kv_dtype=kv_dtype)


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
    *,
    kv_dtype: str,
) -> CostModel:
    type_ = gpu if isinstance(gpu, str) else gpu.name
    name = short_name(name_of(Path(model)) if _is_path(model) else model)
    for path in reversed(files):
        for table in read_grid(path).tables:
            if (table.gpu, short_name(table.model), table.tp) == (type_, name, tp):
                return TableCost(table)
    return TableCost(with_host(cost_table(gpu, model, tp, kv_dtype), host_s))


def cost_table(gpu: str | GpuSpec, model: str, tp: int = 1, kv_dtype: str = AUTO) -> StepTable:
    """Returns the shipped grid's table, or else the roofline's, without host time. Raises
    ConfigError."""
    spec = gpu_spec(gpu) if isinstance(gpu, str) else gpu
    shape = model_shape(model, kv_dtype)
    measured = _shipped_tables().get((spec.name, shape.geometry, tp))
    return measured or roofline(spec, shape, tp)


@cache
def _shipped_tables() -> dict[Key, StepTable]:
    return {
        (table.gpu, model_shape(table.model).geometry, table.tp): table
        for table in shipped_grid().tables
    }


def model_shape(name: str, kv_dtype: str = AUTO) -> ModelShape:
    """Returns the shape of a known model, or else of the config.json at the path `name`. Raises
    ConfigError that names a similar model, or all."""
    shape = known_shape(name)
    if shape is None and _is_path(name):
        shape = read_shape(Path(name))
    if shape is not None:
        if kv_dtype == AUTO:
            return shape
        return replace(shape, kv_dtype_bytes=KV_DTYPE_BYTES[KV_CACHE_DTYPES[kv_dtype]])
    hint = suggestion(name, [*CONFIGS, *(known.rpartition("/")[2] for known in CONFIGS)])
    hint = hint or f"known models are {', '.join(CONFIGS)}"
    raise ConfigError(f"model {name!r}: {hint}")


def _is_path(name: str) -> bool:
    return name.endswith(".json") or (Path(name) / "config.json").is_file()
