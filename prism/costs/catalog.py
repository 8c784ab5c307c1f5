"""Which table serves a (GPU, model, TP)."""

from __future__ import annotations

from functools import cache

from prism.costs.gpus import gpu_spec
from prism.costs.model import CostModel
from prism.costs.roofline import HOST_S, roofline
from prism.costs.shapes import model_shape
from prism.costs.table import StepTable, TableCost, with_host


@cache
def cost_model(gpu: str, model: str, tp: int = 1, host_s: float | None = None) -> CostModel:
    """The best table known for this (GPU, model, TP), with `host_s` in place of its host time
    where given. The same arguments give the same object. Raises ConfigError."""
    table = cost_table(gpu, model, tp)
    return TableCost(table if host_s is None else with_host(table, host_s))


def cost_table(gpu: str, model: str, tp: int = 1) -> StepTable:
    """The table behind `cost_model`. Raises ConfigError."""
    return roofline(gpu_spec(gpu), model_shape(model), tp, HOST_S)
