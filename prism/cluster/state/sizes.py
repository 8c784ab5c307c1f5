"""Memory need of each model: estimated at first, measured once the model has been active."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from prism.config.checks.memory_needs import memory_need, one_of_each_kind, spread_over
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig
from prism.messages.agent import AgentReport
from prism.messages.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Size:
    """Memory need of a whole model, over all devices if it is tensor parallel."""

    weight_bytes: int  # includes the non-elastic shares of its engines
    kv_floor_bytes: int
    token_bytes: int
    share_bytes: int  # non-elastic share of the engine on each device

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_floor_bytes


class Sizes:
    """Sizes of all models at their tensor-parallel degrees. With `learn`, measurements replace
    estimates.

    A policy with a fixed placement needs `learn=False`: its sizes must never change.
    """

    def __init__(self, config: ClusterConfig, learn: bool) -> None:
        self._sizes: dict[str, dict[int, Size]] = {}
        self._specs: dict[str, ModelSpec] = {}
        self._learn = learn
        self.add(config)

    def add(self, config: ClusterConfig) -> None:
        """Adds models that are new or have other files.

        Sizes of models that are not in `config` are kept, since they may still be evicted.
        """
        kinds = one_of_each_kind(config)
        for model in config.models:
            known = self._specs.get(model.name)
            if known is None or _fixed(known) != _fixed(model):
                self._sizes[model.name] = {
                    tp: _computed(spread_over(model, tp), config, kinds)
                    for tp in model.possible_degrees
                }
            self._specs[model.name] = model

    def of(self, model: str) -> Mapping[int, Size]:
        """Returns degree -> size, the least degree first."""
        return self._sizes[model]

    def part_bytes(self, model: str, tp: int) -> int:
        """Returns the model's need on each of its devices; 0 if it was never configured. A degree
        that it cannot have counts as its least one."""
        if model not in self._sizes:
            return 0
        sizes = self._sizes[model]
        tp = tp if tp in sizes else self._specs[model].tp
        return -(-sizes[tp].total_bytes // tp)

    def observe(self, report: AgentReport) -> None:
        """Replaces the sizes of active models by what they hold, if `learn`."""
        for model in report.models:
            sizes, parts = self._sizes.get(model.model, {}), model.tp
            if self._learn and model.state == "active" and parts in sizes:
                computed = sizes[parts]
                sizes[parts] = replace(
                    computed,
                    weight_bytes=model.static_bytes * parts or computed.weight_bytes,
                    kv_floor_bytes=model.kv_reserve_bytes * parts or computed.kv_floor_bytes,
                )


def _fixed(model: ModelSpec) -> tuple[object, ...]:
    return (model.path, model.dtype, model.context_length, model.possible_degrees)


def _computed(model: ModelSpec, config: ClusterConfig, kinds: Sequence[DeviceConfig]) -> Size:
    """Returns the largest need over the devices that can hold the model (page sizes may differ)."""
    pinned = model.pinned_device
    devices = kinds if pinned is None else [config.device(pinned)]
    needs = [(memory_need(model, device, config.engine), device) for device in devices]
    fitting = [need for need, device in needs if need.total_bytes <= device.capacity_bytes]
    need = max(fitting or [need for need, _ in needs], key=lambda need: need.total_bytes)
    tp, part_bytes = model.tp, need.weight_bytes + need.static_bytes
    return Size(part_bytes * tp, need.kv_bytes * tp, model.token_bytes, need.static_bytes)
