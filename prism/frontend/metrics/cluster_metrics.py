"""Prometheus metrics of the cluster's published status."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from prism import clock
from prism.config.schema.endpoints import node_of
from prism.frontend.metrics.request_metrics import malformed_messages
from prism.messages.agent import AgentReport, ModelReport
from prism.messages.cluster import ClusterStatus
from prism.messages.external import ExternalServer
from prism.messages.gpu_memory import GpuMemory

_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
# metric name -> (field of the report, help)
_DEVICE_GAUGES = {
    "prism_device_capacity_bytes": ("capacity_bytes", "Memory of the device"),
    "prism_device_reserved_bytes": ("reserved_bytes", "Memory reserved in the ledger"),
    "prism_device_committed_bytes": ("committed_bytes", "Memory backed by pages"),
    "prism_device_resident_bytes": ("resident_bytes", "Resident memory reported by the OS"),
    "prism_device_page_bytes": ("page_bytes", "Size of a page of the device's memory"),
    "prism_device_engines_free": ("engines_free", "Engine processes without a model"),
    "prism_device_engines_starting": ("engines_starting", "Engine processes being started"),
    "prism_device_engines": ("engines_total", "Engine processes"),
}
_DEVICE_COUNTERS = {
    "prism_engine_restarts": ("engine_restarts_total", "Engine processes replaced"),
}
_DRIVER_GAUGES = {
    "prism_device_memory_drift_bytes": (
        "drift_bytes",
        "GPU memory that the ledger's processes hold beyond their grants",
    ),
    "prism_device_memory_short_bytes": (
        "short_bytes",
        "Memory granted by the ledger that is not free on the GPU",
    ),
    "prism_device_foreign_bytes": ("foreign_bytes", "GPU memory held by other processes"),
    "prism_device_driver_free_bytes": ("free_bytes", "Free GPU memory reported by the driver"),
}
_DRIVER_COUNTERS = {
    "prism_engine_overdrafts": ("replaced_total", "Engines replaced for exceeding their grant"),
}
_MODEL_GAUGES = {
    "prism_model_devices": ("tp", "Devices that the model is spread over"),
    "prism_model_waiting_requests": ("waiting", "Requests in the device's queue"),
    "prism_model_running_requests": ("running", "Requests in the engine"),
    "prism_model_kv_mapped_bytes": ("kv_mapped_bytes", "Mapped KV cache"),
    "prism_model_kv_cached_bytes": ("kv_cached_bytes", "Mapped KV cache of unused prefixes"),
    "prism_model_kv_idle_bytes": ("kv_idle_bytes", "Mapped KV cache without tokens"),
    "prism_model_kv_reserve_bytes": ("kv_reserve_bytes", "Guaranteed KV cache"),
    "prism_model_static_bytes": ("static_bytes", "Weights and the engine's fixed share"),
    "prism_model_activation_seconds": ("activation_s", "Duration of the last activation"),
}
_MODEL_COUNTERS = {
    "prism_model_prompt_tokens": ("prompt_tokens_total", "Prompt tokens computed"),
    "prism_model_output_tokens": ("output_tokens_total", "Tokens generated"),
    "prism_model_finished_requests": ("finished_total", "Requests finished"),
    "prism_model_failed_requests": ("failed_total", "Requests failed"),
    "prism_model_cancelled_requests": ("cancelled_total", "Requests cancelled"),
    "prism_model_maps": ("maps_total", "Page maps"),
    "prism_model_unmaps": ("unmaps_total", "Page unmaps"),
    "prism_model_activations": ("activations_total", "Activations of the model"),
    "prism_model_retractions": ("retractions_total", "Running requests retracted for memory"),
}


@dataclass(frozen=True, slots=True)
class _PerModel:
    """Metric with several values per model and device, distinguished by `label`."""

    name: str
    text: str
    label: str
    values: Callable[[ModelReport], Mapping[str, float]]
    family: _Family = GaugeMetricFamily


def _stages(stages_s: Mapping[str, float]) -> dict[str, float]:
    return {stage: s for stage, s in stages_s.items() if stage != "total"}


def _external_sum(field: str) -> Callable[[ExternalServer], float | None]:
    """Returns a function of a server to the sum of `field` over its ranks. None: the server's
    memory is not managed."""
    return lambda s: sum(getattr(c, field) for c in s.clients) if s.clients else None


# metric name -> (help, value; None: the server has no sample)
_EXTERNAL: Mapping[str, tuple[str, Callable[[ExternalServer], float | None]]] = {
    "prism_external_up": ("1 if the server answers", lambda server: not server.problem),
    "prism_external_asleep": ("1 while the server sleeps", lambda server: server.asleep),
    "prism_external_open_requests": (
        "Requests passed on to the server and not answered",
        lambda server: server.load.requests,
    ),
    "prism_external_kv_held_bytes": ("KV cache of the server", _external_sum("held_bytes")),
    "prism_external_kv_min_bytes": ("Guaranteed KV cache", _external_sum("min_bytes")),
    "prism_external_kv_limit_bytes": (
        "Limit of the KV cache, if there is one",
        lambda server: server.limit_bytes,
    ),
}
_PER_MODEL = (
    _PerModel(
        "prism_model_state", "1 for the model's state", "state", lambda model: {model.state: 1}
    ),
    _PerModel(
        "prism_model_activation_stage_seconds",
        "Stages of the last activation",
        "stage",
        lambda model: _stages(model.stages_s),
    ),
    _PerModel(
        "prism_model_activations_stage_seconds",
        "Time in a stage, over all activations",
        "stage",
        lambda model: _stages(model.stages_total_s),
        CounterMetricFamily,
    ),
    _PerModel(
        "prism_model_activation_link_bytes",
        "Bytes that the last activation moved over each GPU's link to the host",
        "link",
        lambda model: model.link_bytes,
    ),
)
# Exported from the start, so that a rate includes the first increment.
_ACTIONS = [f"{kind}{end}" for kind in ("activate", "evict", "migrate") for end in ("", "_failed")]
_Labelled = Sequence[tuple[list[str], AgentReport | ModelReport | GpuMemory]]


class ClusterCollector(Collector):
    """Collector of a published status. Without a status, or while Redis takes no requests,
    the cluster is reported as not ready."""

    def __init__(self, status: ClusterStatus | None, takes_requests: bool = True) -> None:
        self._status = status
        self._takes_requests = takes_requests  # True if Redis does
        self.registry = CollectorRegistry(support_collectors_without_names=True)
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        return map(_with_nodes, self._collect())

    def _collect(self) -> Iterator[Metric]:
        status = self._status
        ready = float(status is not None and status.ready and self._takes_requests)
        yield GaugeMetricFamily("prism_cluster_ready", "1 when requests are served", ready)
        if status is None:
            return
        age_s = max(0.0, clock.unix_s() - status.time_unix_s)
        yield GaugeMetricFamily("prism_status_age_seconds", "Age of the cluster's status", age_s)
        yield from _cluster(status)
        devices = [([a.device], a) for a in status.agents]
        models = [([a.device, m.model], m) for a in status.agents for m in a.models]
        yield from _families(GaugeMetricFamily, _DEVICE_GAUGES, ["device"], devices)
        yield from _families(CounterMetricFamily, _DEVICE_COUNTERS, ["device"], devices)
        gpus = [([a.device], a.gpu) for a in status.agents if a.gpu is not None]
        yield from _families(GaugeMetricFamily, _DRIVER_GAUGES, ["device"], gpus)
        yield from _families(CounterMetricFamily, _DRIVER_COUNTERS, ["device"], gpus)
        yield from _families(GaugeMetricFamily, _MODEL_GAUGES, ["device", "model"], models)
        yield from _families(CounterMetricFamily, _MODEL_COUNTERS, ["device", "model"], models)
        yield from (_per_model(status, metric) for metric in _PER_MODEL)
        yield from _external(status.external)


def _with_nodes(family: Metric) -> Metric:
    """Adds the label `node` to the samples of devices, if there are several machines."""
    for index, sample in enumerate(family.samples):
        if node := node_of(sample.labels.get("device", "")):
            family.samples[index] = sample._replace(labels={**sample.labels, "node": node})
    return family


def _cluster(status: ClusterStatus) -> Iterator[Metric]:
    placement = GaugeMetricFamily(
        "prism_placement", "1 where a model is placed", labels=["model", "device"]
    )
    for model, first in status.placement.items():
        for device in status.copies.get(model, (first,)):
            placement.add_metric([model, device], 1)
    yield placement
    depth = {a.device: float(sum(m.waiting for m in a.models)) for a in status.agents}
    yield _by_label("prism_queue_depth", "Requests waiting for a device", "device", depth)
    text = "Waiting requests of models that are not placed"
    yield _by_label("prism_unplaced_requests", text, "model", status.unplaced)
    overload = dict.fromkeys(status.overload, 1)
    yield _by_label("prism_overload", "1 for a model refused for overload", "model", overload)
    yield _by_label("prism_kvpr", "KV pressure ratio", "device", status.kvpr)
    yield _by_label("prism_token_rate", "Tokens per second", "model", status.token_rates)
    actions = CounterMetricFamily("prism_actions", "Actions of the scheduler", labels=["action"])
    for action, count in (dict.fromkeys(_ACTIONS, 0) | status.actions_total).items():
        actions.add_metric([action], count)
    yield actions
    agents = {agent.device: agent.malformed_total for agent in status.agents}
    yield malformed_messages({"scheduler": status.malformed_total, **agents})


def _by_label(
    name: str, text: str, label: str, values: dict[str, float] | dict[str, int]
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _families(
    kind: _Family,
    table: dict[str, tuple[str, str]],
    labels: list[str],
    rows: _Labelled,
) -> Iterator[Metric]:
    for name, (attribute, text) in table.items():
        family = kind(name, text, labels=labels)
        for values, report in rows:
            family.add_metric(values, getattr(report, attribute))
        yield family


def _external(servers: Sequence[ExternalServer]) -> Iterator[Metric]:
    for name, (text, value_of) in _EXTERNAL.items():
        family = GaugeMetricFamily(name, text, labels=["model", "server"])
        for server in servers:
            if (value := value_of(server)) is not None:
                family.add_metric([server.model, server.url], value)
        yield family


def _per_model(status: ClusterStatus, metric: _PerModel) -> Metric:
    labels = ["device", "model", metric.label]
    family = metric.family(metric.name, metric.text, labels=labels)
    for agent in status.agents:
        for report in agent.models:
            for key, value in metric.values(report).items():
                family.add_metric([agent.device, report.model, key], value)
    return family
