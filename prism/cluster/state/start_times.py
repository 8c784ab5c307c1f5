"""Start-up times of models, estimated from measured loads (ServerlessLLM, OSDI 2024, §6.1).

A load's bandwidth depends on where the weights are: in the machine's weight store, where a model
that was activated or prefetched there is, or in files. Waits for an engine and for memory are not
part of a start.
"""

from __future__ import annotations

from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.endpoints import node_of
from prism.messages.agent import AgentReport
from prism.messages.model_spec import ModelSpec

_WAITS = ("engine", "shrink")  # stages


class StartTimes:
    """Measured loads of each machine, and estimates from them."""

    def __init__(self) -> None:
        self._stored: set[tuple[str, str]] = set()  # (node, model) in the node's weight store
        # (device, model) -> (epoch, number) of its last observed activation
        self._seen: dict[tuple[str, str], tuple[int, int]] = {}
        # (node, model, from the store) -> seconds of the last load
        self._seconds: dict[tuple[str, str, bool], float] = {}
        # (node, from the store) -> bytes/s of the last load
        self._rates: dict[tuple[str, bool], float] = {}

    def observe(self, report: AgentReport, config: ClusterConfig) -> None:
        """Records the activations that have ended since the device's last report."""
        for model in report.models:
            key, ended = (report.device, model.model), (report.epoch, model.activations_total)
            waits_s = sum(model.stages_s.get(stage, 0.0) for stage in _WAITS)
            seconds = model.stages_s.get("total", 0.0) - waits_s
            if model.state == "active" and seconds > 0 and self._seen.get(key) != ended:
                self._seen[key] = ended
                self._measured(config, *key, seconds)

    def _measured(self, config: ClusterConfig, device: str, model: str, seconds: float) -> None:
        spec = next((spec for spec in config.models if spec.name == model), None)
        if spec is None:
            return  # a reload removed it
        node = node_of(device)
        stored = (node, model) in self._stored
        self._seconds[node, model, stored] = seconds
        self._rates[node, stored] = spec.weight_bytes / seconds
        if config.engine.weight_store:
            self.stored(device, model)

    def stored(self, device: str, model: str) -> None:
        """Records that the store of the device's machine has the model."""
        self._stored.add((node_of(device), model))

    def of(self, model: ModelSpec, config: ClusterConfig) -> dict[str, float]:
        """Returns device -> estimated seconds of the model's start there; empty until a load of
        any model was measured.

        An estimate is the model's last load on the machine from the same place, or its size over
        the bandwidth of that place.
        """
        found = {d.name: self._estimate_s(model, node_of(d.name)) for d in config.devices}
        return {device: seconds for device, seconds in found.items() if seconds is not None}

    def _estimate_s(self, model: ModelSpec, node: str) -> float | None:
        stored = (node, model.name) in self._stored
        measured_s = self._seconds.get((node, model.name, stored))
        if measured_s is not None:
            return measured_s
        # Files are slower than a store, so their bandwidth is a lower bound of its.
        rate = self._rate(node, stored) or self._rate(node, False)
        return None if rate is None else model.weight_bytes / rate

    def _rate(self, node: str, stored: bool) -> float | None:
        """Returns the measured bandwidth, of the slowest other machine if this one has none."""
        others = (rate for (_, place), rate in self._rates.items() if place is stored)
        return self._rates.get((node, stored)) or min(others, default=None)
