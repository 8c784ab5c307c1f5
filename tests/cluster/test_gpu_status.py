"""A GPU's memory on its way from the agent's report to operators."""

from __future__ import annotations

import msgspec
from prometheus_client import generate_latest
from rich.console import Console

from prism.frontend.metrics.cluster_metrics import ClusterCollector
from prism.messages.agent import AgentReport
from prism.messages.cluster import ClusterStatus
from prism.messages.gpu_memory import ForeignProcess, GpuMemory
from prism.serve.console import status_tables as tables
from tests.cluster.test_cluster_view import look, make_state, report, seen

MIB = 1 << 20


def status(*agents: AgentReport) -> ClusterStatus:
    return ClusterStatus(time_unix_s=0.0, policy="prism", placement={}, agents=list(agents))


def metrics(*agents: AgentReport) -> str:
    return generate_latest(ClusterCollector(status(*agents)).registry).decode()


def shown(*agents: AgentReport) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(tables.cluster(status(*agents)))
    return capture.get()


def test_the_drift_is_a_metric() -> None:
    gpu = GpuMemory(
        total_bytes=1000,
        free_bytes=300,
        drift_bytes=-25,
        short_bytes=7,
        foreign=(ForeignProcess(1, 40), ForeignProcess(2, 2)),
        replaced_total=3,
    )
    text = metrics(report("cuda:0", gpu=gpu), report("host:0"))
    for line in (
        'prism_device_memory_drift_bytes{device="cuda:0"} -25.0',
        'prism_device_memory_short_bytes{device="cuda:0"} 7.0',
        'prism_device_foreign_bytes{device="cuda:0"} 42.0',
        'prism_device_driver_free_bytes{device="cuda:0"} 300.0',
        'prism_engine_overdrafts_total{device="cuda:0"} 3.0',
    ):
        assert line in text.splitlines()
    assert 'drift_bytes{device="host:0"}' not in text


def test_the_status_names_who_holds_what() -> None:
    gpu = GpuMemory(
        total_bytes=1000 * MIB,
        free_bytes=300 * MIB,
        drift_bytes=-25 * MIB,
        foreign=(ForeignProcess(4711, 40 * MIB, "python"),),
    )
    text = shown(report("cuda:0", gpu=gpu), report("host:0"))
    assert "4711 (python) 40MiB" in text
    assert "-25MiB" in text
    assert "300MiB of 1000MiB" in text
    assert "by its driver" not in shown(report("host:0"))


def test_policies_see_what_idle_engines_leave() -> None:
    """Excludes the engines' contexts, which stay when all models are gone."""
    state = make_state()
    devices = [msgspec.structs.replace(d, idle_bytes=1000) for d in state.config.devices]
    state.served.config = msgspec.structs.replace(state.config, devices=devices)
    seen(state, report("host:0", reserved_bytes=3000))
    _, gpus = look(state)
    capacity_bytes = devices[0].capacity_bytes
    assert gpus["host:0"].capacity_bytes == gpus["host:1"].capacity_bytes == capacity_bytes - 3000
    assert gpus["host:0"].free_bytes == capacity_bytes - 3000
    seen(state, report("host:0", reserved_bytes=1000, engines_starting=2))
    assert look(state)[1]["host:0"].free_bytes == capacity_bytes - 3000
