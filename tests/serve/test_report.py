"""Report of each machine to an operator of several."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console, RenderableType

from prism.cli import watch
from prism.cli.watch import picture
from prism.config.schema.access import ApiKey, hashed
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig, FrontendConfig
from prism.messages.agent import AgentReport, ModelReport
from prism.messages.cluster import ClusterStatus
from prism.messages.external import ExternalServer
from prism.messages.model_spec import ModelSpec
from prism.serve.console import report, status_tables
from prism.serve.console.ready import first_request
from tests.cluster.conftest import spec
from tests.frontend.pages import external


def seen(status: ClusterStatus) -> list[list[str]]:
    """Returns the cells of each line."""
    return cells(status_tables.cluster(status))


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


def configured(*models: ModelSpec) -> ClusterConfig:
    return ClusterConfig(
        namespace="n",
        run_dir="/run",
        redis_url="",
        policy="prism",
        devices=[DeviceConfig("host:0", 1 << 24, 4096, 2)],
        models=list(models),
    )


def test_a_check_shows_the_degrees_of_a_model() -> None:
    config = configured(
        spec("a", degrees=(1, 2, 4), num_kv_heads=4), spec("b", degrees=(1,)), spec("c")
    )
    names = [line[0] for line in cells(report.configuration(config))]
    assert "a, tp 1 at first, 2, 4 possible" in names
    assert {"b", "c"} <= {*names}


@pytest.mark.parametrize("width", [40, 80, 200])
def test_names_are_whole_in_any_terminal(width: int) -> None:
    names = ["meta-llama/Llama-3.1-8B-Instruct", "tiny-gpt2", "tiny-llama"]
    agents = [agent("host:0@rack-7", ModelReport(names[0], "active"))]
    agents += [agent("host:1@rack-7", ModelReport(names[1], "draining", waiting=12))]
    status = ClusterStatus(
        0.0, "prism", {}, agents, names, unplaced={"tiny-llama": 3}, node="rack-7"
    )
    out = io.StringIO()
    Console(file=out, width=width).print(picture(status, width))
    shown = out.getvalue()
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    assert ("columns in a wider terminal" in shown) == (width < 200)
    if width >= 80:
        assert all(f"│ {name} " in shown for name in (*names, "host:0@rack-7"))
        assert "unplaced │ 3" in shown


def test_a_bar_without_colours_has_a_mark_for_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelReport("a", "active", static_bytes=1 << 22, kv_mapped_bytes=1 << 21)
    whole = msgspec.structs.replace(
        agent("host:0", model), capacity_bytes=1 << 23, reserved_bytes=7 << 20
    )
    status = ClusterStatus(0.0, "prism", {}, [whole], ["a"])
    out = io.StringIO()
    Console(file=out, width=120).print(picture(status, 120, colours=False))
    assert f"{'#' * 20}{'|' * 10}{':' * 5}{'.' * 5} " in out.getvalue()
    assert "# weights  | KV  : other  . free" in out.getvalue()
    assert "█" not in out.getvalue()
    with monkeypatch.context() as patch:
        patch.setattr(watch, "_status", lambda _config: status)
        watch.show(configured(), Console(file=out, width=120), 1.0, once=True, as_json=False)
    assert out.getvalue().count("# weights") == 2


def test_a_model_without_a_device_has_a_row() -> None:
    status = ClusterStatus(
        0.0, "prism", {}, [agent("host:0", ModelReport("a", "active"))], ["a", "b", "c"],
        refusals={"b": "there is no room"}, overload=["b"],
    )  # fmt: skip
    lines = seen(status)
    assert ["b", "-", "refused", "0"] in [line[:4] for line in lines]
    assert ["c", "-", "not loaded", "0"] in [line[:4] for line in lines]
    assert ["b cannot be placed now: there is no room"] in lines


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("has_models", [True, False])
def test_external_servers_have_a_table(width: int, *, has_models: bool) -> None:
    servers = [*external(), ExternalServer("phi", "http://[fd00::1]:80", unmanaged="elsewhere")]
    agents = [agent("host:0", ModelReport("tiny", "active"))] if has_models else []
    names = ["tiny"] if has_models else []
    out = io.StringIO()
    status = ClusterStatus(0.0, "prism", {}, agents, names, external=servers)
    Console(file=out, width=width).print(picture(status, width))
    shown = out.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    assert all(f"│ {s.model} " in shown and f"│ {s.url} " in shown for s in servers)
    text = " ".join(shown.split())
    assert all(f"{s.url}: {why}" in text for s in servers if (why := s.reason or s.unmanaged))
    assert "policy prism, not ready" in shown
    assert ("engines free" in shown) <= has_models
    if width == 200:
        lines = cells(status_tables.cluster(status))
        llama, memory = servers[0], ["11.6GiB", "12GiB", "4GiB", "2.9GiB", "32GiB"]
        row = [llama.model, llama.url, "answers", "14", *memory, "gpus/cuda:0, gpus/cuda:1"]
        assert row in lines
        assert "asleep" in next(line for line in lines if servers[3].url in line)
        alone = [servers[2].model, servers[2].url, "answers", "3", *"------"]
        assert alone in lines
        assert "problem" in next(line for line in lines if servers[1].url in line)


def test_without_external_servers_there_is_no_table_of_them() -> None:
    assert ["external servers"] not in seen(ClusterStatus(0.0, "prism", {}, [agent("host:0")]))


def test_the_first_request_has_what_a_guarded_cluster_wants() -> None:
    frontend = FrontendConfig(tls_certificate="/etc/cert.pem", tls_key="/etc/key.pem")
    plain = configured(spec("a"))
    assert "Authorization" not in first_request(plain)
    keys = [ApiKey("alice", hashed("k"))]
    command = first_request(msgspec.structs.replace(plain, frontend=frontend, keys=keys))
    assert command.startswith("curl --cacert /etc/cert.pem https://127.0.0.1:")
    assert '-H "Authorization: Bearer $OPENAI_API_KEY"' in command
    assert '"model": "a"' in command
