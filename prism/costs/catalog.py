"""Which table serves a (GPU, model, TP): a user's, the shipped grid's, or the roofline."""

from __future__ import annotations

from functools import cache

from prism.costs.gpus import gpu_spec
from prism.costs.grid import shipped_grid
from prism.costs.model import CostModel
from prism.costs.roofline import roofline
from prism.costs.shapes import ModelShape, model_shape
from prism.costs.table import StepTable, TableCost, with_host

HOST_S = 1.5e-3
Key = tuple[str, ModelShape, int]


@cache
def cost_model(gpu: str, model: str, tp: int = 1, host_s: float = HOST_S) -> CostModel:
    """The best table known for this (GPU, model, TP). host_s: time per step not hidden behind the
    GPU. The same arguments give the same object. Raises ConfigError."""
    return TableCost(with_host(cost_table(gpu, model, tp), host_s))


def cost_table(gpu: str, model: str, tp: int = 1) -> StepTable:
    """The shipped grid's table, or the roofline where it has none; without host time. Raises
    ConfigError."""
    spec, shape = gpu_spec(gpu), model_shape(model)
    measured = _shipped_tables().get((spec.name, shape.geometry, tp))
    return measured or roofline(spec, shape, tp)


@cache
def _shipped_tables() -> dict[Key, StepTable]:
    return {
        (table.gpu, model_shape(table.model).geometry, table.tp): table
        for table in shipped_grid().tables
    }
