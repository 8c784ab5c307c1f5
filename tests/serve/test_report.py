"""Report of each machine to an operator of several."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig
from prism.messages.agent import AgentReport, ModelReport
from prism.messages.cluster import ClusterStatus
from prism.serve.console import report
from tests.cluster.conftest import spec


def seen(status: ClusterStatus) -> list[list[str]]:
    """Returns the cells of each line."""
    return cells(report.cluster(status))


def cells(table: RenderableType) -> list[list[str]]:
    out = io.StringIO()
    Console(file=out, width=200).print(table)
    return [
        [c.strip() for c in line.strip("│┃ ").split("│")] for line in out.getvalue().splitlines()
    ]


def agent(device: str, *models: ModelReport) -> AgentReport:
    return AgentReport(device, 1, 0.0, 1 << 30, 4096, 1 << 20, 0, 0, 2, 0, 3, list(models))


def test_nodes_are_summed_up_and_one_without_an_agent_is_there() -> None:
    models = [ModelReport("m", "active", waiting=2, running=1), ModelReport("n", "active")]
    agents = [agent("host:0@a", *models), agent("host:1@a", models[0]), agent("host:0@b")]
    silent = {"host:0@c": "its agent does not report", "redis": "ended"}
    lines = seen(
        ClusterStatus(0.0, "prism", {}, agents, node="b", degraded=silent, drained={"host:0@b": ""})
    )
    assert ["nodes, b leads"] in lines
    assert ["a", "2", "2", "4", "2", "2MiB", "2GiB", "4/6"] in lines
    assert ["b (drained)", "1", "0", "0", "0", "1MiB", "1GiB", "2/3"] in lines
    assert ["c", "0", "0", "0", "0", "0B", "0B", "0/0"] in lines
    assert not [line for line in lines if line[0].startswith("redis") and len(line) > 1]


def test_one_machine_has_no_table_of_nodes() -> None:
    assert not [
        line
        for line in seen(ClusterStatus(0.0, "prism", {}, [agent("host:0")]))
        if line[0].startswith("node")
    ]


def test_a_check_shows_the_degrees_of_a_model() -> None:
    config = ClusterConfig(
        namespace="n",
        run_dir="/run",
        redis_url="",
        policy="prism",
        devices=[DeviceConfig("host:0", 1 << 24, 4096, 2)],
        models=[spec("a", degrees=(1, 2, 4), num_kv_heads=4), spec("b", degrees=(1,)), spec("c")],
    )
    names = [line[0] for line in cells(report.configuration(config))]
    assert "a, tp 1 at first, 2, 4 possible" in names
    assert {"b", "c"} <= {*names}
